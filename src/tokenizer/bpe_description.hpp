// What a tokenizer.json says around its model: added tokens, post-processor, decoder, and the parts that must
// be off.
#pragma once

#include <cstdint>
#include <vector>

#include "tokenizer/added_tokens.hpp"
#include "tokenizer/bpe_model.hpp"
#include "tokenizer/json_cursor.hpp"

namespace longhalo {

struct Affixes {
  std::vector<int32_t> prefix;
  std::vector<int32_t> suffix;
};

/// Refuses top-level parts that LongHalo does not do (truncation, padding, decoders other than ByteLevel).
void check_top_level(const JsonCursor& tokenizer);

/// Reads "added_tokens". Throws UserError for ids that are absurd, used twice or not those of the vocabulary.
std::vector<AddedToken> read_added_tokens(const JsonCursor& tokenizer, const BpeModel& model);

/// Reads "post_processor": null, ByteLevel, TemplateProcessing, or a Sequence of these.
Affixes read_affixes(const JsonCursor& tokenizer);

}  // namespace longhalo

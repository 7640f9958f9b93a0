// A byte-level BPE tokenizer.json as a Tokenizer: valid stretches -> added tokens -> NFC -> pre-tokenizer ->
// merges.
#pragma once

#include <filesystem>
#include <memory>

#include "tokenizer/tokenizer.hpp"

namespace longhalo {

/// Throws UserError as Tokenizer::load().
std::unique_ptr<Tokenizer> load_bpe_tokenizer(const std::filesystem::path& tokenizer_json);

}  // namespace longhalo

// A SentencePiece tokenizer.model as a Tokenizer, with the added tokens that tokenizer_config.json or
// added_tokens.json beside it names.
//
// The library does the text: normalisation, U+FFFD for invalid UTF-8, byte fallback. A model that puts a
// space before a text puts one after each special token too, unless tokenizer_config.json says "legacy":
// false. decode() takes that space away at the start of each stretch between special tokens.
//
// The library merges over a whole text at once, which is slow for BPE. Where it changes nothing (see
// words_are_independent) the text goes to it word by word, and words already seen come from a cache.
#pragma once

#include <filesystem>
#include <memory>

#include "tokenizer/tokenizer.hpp"

namespace longhalo {

/// Throws UserError as Tokenizer::load().
std::unique_ptr<Tokenizer> load_sentencepiece_tokenizer(const std::filesystem::path& tokenizer_model);

}  // namespace longhalo

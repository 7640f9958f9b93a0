// A SentencePiece tokenizer.model as a Tokenizer, with the added tokens that tokenizer_config.json or
// added_tokens.json beside it names.
//
// The library does the text: normalisation, U+FFFD for invalid UTF-8, byte fallback. Each stretch of text
// between special tokens is encoded as a text of its own, so a model that puts a space before a text puts one
// there too. decode() takes that space away again.
#pragma once

#include <filesystem>
#include <memory>

#include "tokenizer/tokenizer.hpp"

namespace longhalo {

/// Throws UserError as Tokenizer::load().
std::unique_ptr<Tokenizer> load_sentencepiece_tokenizer(const std::filesystem::path& tokenizer_model);

}  // namespace longhalo

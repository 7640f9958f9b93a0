// Text to token ids and back, as the model's own tokenizer does it.
//
// Two families, chosen by what the model directory holds: tokenizer.json with a byte-level BPE model (GPT-2,
// SmolLM2, Llama-3, Qwen), or tokenizer.model (SentencePiece: Llama-2, Mistral). Ids agree with the
// `tokenizers` and `sentencepiece` packages on every valid UTF-8 text. What a file asks for and LongHalo does
// not do is refused by name.
//
// Text that is not valid UTF-8: byte-level BPE is lossless. Each maximal valid stretch is encoded as a text
// of its own, each byte between them becomes the token of that byte, and decode() gives the same bytes back.
// SentencePiece replaces such bytes by U+FFFD, as its library does.
//
// Some vocabularies lack tokens for bytes that their training text never held (SmolLM2: 21 of 256). Such a
// byte becomes the file's unknown token; where the file names none it is left out, as the package does, and a
// warning counts them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace longhalo {

/// What a special token's name means inside a text, e.g. "<|im_end|>".
enum class SpecialTokens {
  kAsText,  ///< A document: the name is plain text. (Added tokens that are not special are still recognised.)
  kParse,   ///< A template: the name is the token.
};

/// Called now and then while a long text is encoded, with (bytes done, bytes in all); the last call has both
/// equal.
using EncodeProgress = std::function<void(int64_t, int64_t)>;

/// The file of a model directory that tells one tokenizer from another: tokenizer.json, else tokenizer.model.
/// (Where a model brings both, either does.)
std::filesystem::path tokenizer_file(const std::filesystem::path& model_directory);

/// All members are const and may be called from several threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// Reads tokenizer.json or tokenizer.model of a Hugging Face directory. Throws UserError naming file and
  /// JSON path for a missing, damaged or inconsistent file and for every feature that is not supported.
  /// `named_by` is where the user named the directory.
  static std::unique_ptr<Tokenizer> load(const std::filesystem::path& model_directory,
                                         std::string_view named_by = "model.path");

  /// Ids of `text`, without prefix() and suffix().
  std::vector<int32_t> encode(std::string_view text, SpecialTokens mode) const {
    return encode(text, mode, {});
  }
  virtual std::vector<int32_t> encode(std::string_view text, SpecialTokens mode,
                                      const EncodeProgress& progress) const = 0;

  /// The exact bytes that `ids` stand for, special tokens by their names. A byte-level token may be part of a
  /// character, so the result need not be valid UTF-8. Throws UserError for an id that is no token.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;

  /// Bytes of text that the token stands for; 0 for a special token and for an id that is none.
  /// (SentencePiece counts the space that it puts before a text.)
  virtual int64_t text_bytes(int32_t id) const = 0;

  /// Largest id + 1. A model's vocabulary may be larger (padded).
  virtual int64_t vocabulary_size() const = 0;

  /// The id of a token by its name as the file spells it, special tokens too.
  virtual std::optional<int32_t> token_id(std::string_view token) const = 0;

  /// Tokens that the model expects before (e.g. begin of text) and after a text; usually none or one.
  virtual const std::vector<int32_t>& prefix() const = 0;
  virtual const std::vector<int32_t>& suffix() const = 0;
};

}  // namespace longhalo

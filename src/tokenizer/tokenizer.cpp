#include "tokenizer/tokenizer.hpp"

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/text.hpp"
#include "tokenizer/json_cursor.hpp"
#if LONGHALO_HAVE_PCRE2
#include "tokenizer/bpe_tokenizer.hpp"
#endif
#if LONGHALO_HAVE_SENTENCEPIECE
#include "tokenizer/sentencepiece_tokenizer.hpp"
#endif

namespace longhalo {
namespace {

[[maybe_unused, noreturn]] void left_out(const std::filesystem::path& file, std::string_view library,
                                         std::string_view package) {
  throw UserError(text("this build of LongHalo cannot read ", file.filename().string(), ": ", library,
                       " was not found when it was configured"),
                  file.string(),
                  text("install ", library, " (Debian: ", package, "), configure again and rebuild"));
}

/// Whether a tokenizer.json is of the byte-level kind, which is preferred where a model brings both files.
bool is_byte_level(const std::filesystem::path& tokenizer_json) {
  const nlohmann::json content = read_json_file(tokenizer_json);
  return content.is_object() && content.contains("decoder") && content["decoder"].is_object() &&
         content["decoder"].value("type", nlohmann::json()) == "ByteLevel";
}

}  // namespace

std::filesystem::path tokenizer_file(const std::filesystem::path& model_directory) {
  std::error_code ignored;
  const std::filesystem::path json = model_directory / "tokenizer.json";
  return std::filesystem::exists(json, ignored) ? json : model_directory / "tokenizer.model";
}

std::unique_ptr<Tokenizer> Tokenizer::load(const std::filesystem::path& model_directory,
                                           std::string_view named_by) {
  require_folder(model_directory, "the folder of the tokenizer",
                 text("correct ", named_by,
                      ", or fetch the model (scripts/fetch_model.py fetches the one that the examples use)"));
  const auto sentencepiece = model_directory / "tokenizer.model";
  const auto bpe = model_directory / "tokenizer.json";
  const bool has_bpe = std::filesystem::is_regular_file(bpe);
  // Beside a SentencePiece model, a tokenizer.json is usually its conversion; the original is read then.
  if (std::filesystem::is_regular_file(sentencepiece) && !(has_bpe && is_byte_level(bpe))) {
#if LONGHALO_HAVE_SENTENCEPIECE
    return load_sentencepiece_tokenizer(sentencepiece);
#else
    left_out(sentencepiece, "SentencePiece", "libsentencepiece-dev");
#endif
  }
  if (has_bpe) {
#if LONGHALO_HAVE_PCRE2
    return load_bpe_tokenizer(bpe);
#else
    left_out(bpe, "PCRE2", "libpcre2-dev");
#endif
  }
  throw UserError("the model has neither tokenizer.json nor tokenizer.model", model_directory.string(),
                  "give the folder of a complete Hugging Face model");
}

}  // namespace longhalo

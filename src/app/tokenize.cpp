#include "app/tokenize.hpp"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "dataset/documents.hpp"
#include "dataset/token_file.hpp"
#include "storage/atomic_file.hpp"
#include "storage/sha256.hpp"
#include "tokenizer/tokenizer.hpp"

namespace longhalo {
namespace fs = std::filesystem;
namespace {

// "SmolLM2-135M/tokenizer.json", also when the model directory is given as "." or with a slash at its end.
std::string tokenizer_name(const fs::path& model) {
  std::error_code ignored;
  const fs::path whole = fs::canonical(model, ignored);
  return (whole.filename() / tokenizer_file(model).filename()).string();
}

void refuse_existing(const fs::path& file, IfOutputExists if_exists) {
  std::error_code ignored;
  if (fs::is_directory(file, ignored)) {
    throw UserError("the output is a folder", file.string(), "name a file in it");
  }
  if (if_exists == IfOutputExists::kError && fs::exists(file, ignored)) {
    throw UserError("the output exists already", file.string(),
                    "choose another name, or give --force, which replaces it");
  }
}

void encode(const TokenizeOptions& options, const Tokenizer& tokenizer) {
  const fs::path output = options.output;
  refuse_existing(output, options.if_exists);
  remove_abandoned_temporaries(output.has_parent_path() ? output.parent_path() : fs::path("."),
                               Abandoned::kWriterGone);
  int64_t total_bytes = 0;
  for (const std::string& input : options.inputs)
    total_bytes += static_cast<int64_t>(read_document(input).text.size());

  TokenFileWriter writer(output, {tokenizer.vocabulary_size(), tokenizer_name(options.model),
                                  sha256_of_file(tokenizer_file(options.model))});
  Progress progress("tokenising", total_bytes, ProgressUnit::kBytes, options.progress);
  int64_t bytes_before = 0;
  for (const std::string& input : options.inputs) {
    const Document document = read_document(input);
    writer.append_document(
        document.name, tokenizer.encode(document.text, SpecialTokens::kAsText,
                                        [&](int64_t done, int64_t) { progress.set(bytes_before + done); }));
    bytes_before += static_cast<int64_t>(document.text.size());
  }
  writer.commit();
  progress.finish();
  log_info(
      text("wrote ", options.inputs.size(), " documents, ", writer.tokens(), " tokens (",
           static_cast<double>(bytes_before) / static_cast<double>(std::max<int64_t>(writer.tokens(), 1)),
           " bytes a token) to ", options.output));
}

// A file name for each document: the last part of its path, with its number before it where that is taken.
std::vector<fs::path> output_files(const TokenFile& tokens, const fs::path& folder) {
  std::set<std::string> taken;
  std::vector<fs::path> files;
  for (int64_t i = 0; i < tokens.documents(); ++i) {
    std::string name = fs::path(tokens.document_name(i)).filename().string();
    if (name.empty() || name == "." || name == "..") name = "document.txt";
    while (!taken.insert(name).second)
      name = text(i, "_", name);
    files.push_back(folder / name);
  }
  return files;
}

void decode(const TokenizeOptions& options, const Tokenizer& tokenizer) {
  const TokenFile tokens(options.decode);
  const std::string digest = sha256_of_file(tokenizer_file(options.model));
  if (!tokens.info().tokenizer_sha256.empty() && tokens.info().tokenizer_sha256 != digest) {
    throw UserError(text("the tokens were made with another tokenizer, ", tokens.info().tokenizer),
                    options.decode,
                    text("name the model whose tokenizer file has sha256 ", tokens.info().tokenizer_sha256));
  }
  const fs::path folder = options.output;
  const std::vector<fs::path> files = output_files(tokens, folder);
  for (const fs::path& file : files)
    refuse_existing(file, options.if_exists);
  make_directory(folder, "the output folder", "choose another output folder");
  remove_abandoned_temporaries(folder, Abandoned::kWriterGone);
  int64_t total_tokens = 0;
  for (int64_t i = 0; i < tokens.documents(); ++i)
    total_tokens += tokens.document_tokens(i);
  Progress progress("decoding", total_tokens, ProgressUnit::kTokens, options.progress);
  for (int64_t i = 0; i < tokens.documents(); ++i) {
    write_file_atomically(files[static_cast<size_t>(i)], tokenizer.decode(tokens.read(i)));
    progress.add(tokens.document_tokens(i));
  }
  progress.finish();
  log_info(text("wrote ", files.size(), " documents, ", total_tokens, " tokens, to ", options.output));
}

}  // namespace

void run_tokenize(const TokenizeOptions& options) {
  if (options.inputs.empty() == options.decode.empty()) {
    throw UserError("there are either text files to encode or one token file to decode", "the command line",
                    "longhalo tokenize --model DIR --output tokens.h5 a.txt b.txt, or "
                    "longhalo tokenize --model DIR --decode tokens.h5 --output FOLDER");
  }
  const std::unique_ptr<Tokenizer> tokenizer = Tokenizer::load(options.model);
  options.decode.empty() ? encode(options, *tokenizer) : decode(options, *tokenizer);
}

}  // namespace longhalo

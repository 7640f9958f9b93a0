#include "app/tokenize.hpp"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>

#include "app/document_list.hpp"
#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/log.hpp"
#include "core/model_names.hpp"
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

bool is_same(const fs::path& a, const fs::path& b) {
  std::error_code ignored;
  return fs::equivalent(a, b, ignored);
}

// Which of the files that are read lies at `place`, by whatever name; empty for none. A name that belongs to
// a model counts in its folder where no such file is yet, too: it would be read as a part of the model.
fs::path read_there(const fs::path& place, const TokenizeOptions& options) {
  for (const std::string& input : options.inputs)
    if (is_same(input, place)) return input;
  if (!options.decode.empty() && is_same(options.decode, place)) return options.decode;
  const fs::path model = options.model;
  if (is_of_model(place.filename()) && is_same(model, place.has_parent_path() ? place.parent_path() : "."))
    return model / place.filename();
  // Its files may be links to where they are stored.
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(model, ignored))
    if (is_of_model(entry.path().filename()) && is_same(entry.path(), place)) return entry.path();
  return {};
}

// Where a file that is named `output` comes to lie: links stay, and lead to it. Throws UserError where it may
// not be put there.
fs::path place_of(const fs::path& output, const TokenizeOptions& options) {
  fs::path place = end_of_trusted_links(output);
  const std::string where =
      place == output ? output.string() : text(output.string(), ", a link to ", place.string());
  if (const fs::path taken = read_there(place, options); !taken.empty())
    throw UserError(text("the output would take the place of what is read, ", taken.string()), where,
                    "give another --output; --force does not replace what is read");
  std::error_code ignored;
  if (fs::is_directory(place, ignored)) throw UserError("the output is a folder", where, "name a file in it");
  if (options.if_exists == IfOutputExists::kError && fs::exists(fs::symlink_status(place, ignored)))
    throw UserError("the output exists already", where,
                    "choose another name, or give --force, which replaces it");
  return place;
}

void encode(const TokenizeOptions& options, const Tokenizer& tokenizer) {
  refuse_repeats(options.inputs, "document", [](size_t a, size_t b) {
    return text("the command line, text files ", a + 1, " and ", b + 1);
  });
  const fs::path output = place_of(options.output, options);
  remove_abandoned_temporaries(output.has_parent_path() ? output.parent_path() : fs::path("."),
                               Abandoned::kWriterGone);
  int64_t total_bytes = 0;
  look_at_each(options.inputs, "the command line", [&](const std::string& input) {
    total_bytes += static_cast<int64_t>(read_document(input).text.size());
  });

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

// The same with links followed. Throws UserError where one may not be written, or two are one.
std::vector<fs::path> output_places(const TokenFile& tokens, const TokenizeOptions& options) {
  std::vector<fs::path> places;
  std::set<fs::path> taken;
  for (const fs::path& file : output_files(tokens, options.output)) {
    places.push_back(place_of(file, options));
    std::error_code ignored;
    if (!taken.insert(fs::weakly_canonical(fs::absolute(places.back(), ignored), ignored)).second)
      throw UserError(text("a link leads to where another document is written, ", places.back().string()),
                      file.string(), "remove the link, or give another --output");
  }
  return places;
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
  const std::vector<fs::path> files = output_places(tokens, options);
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
  const std::unique_ptr<Tokenizer> tokenizer = Tokenizer::load(options.model, "--model");
  options.decode.empty() ? encode(options, *tokenizer) : decode(options, *tokenizer);
}

}  // namespace longhalo

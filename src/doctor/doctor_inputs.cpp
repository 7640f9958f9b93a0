#include "doctor/doctor_inputs.hpp"

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>

#include "app/inputs.hpp"
#include "core/text.hpp"
#include "dataset/documents.hpp"
#include "dataset/token_file.hpp"
#include "model/model_config.hpp"
#include "storage/posix.hpp"
#include "storage/safetensors.hpp"
#include "tokenizer/tokenizer.hpp"

namespace longhalo {
namespace {

namespace fs = std::filesystem;

std::string size_text(int64_t bytes) {
  return bytes < 10'000'000 ? text(bytes, " bytes") : text(bytes / 1'000'000, " MB");
}

std::string count_text(size_t count, std::string_view what) {
  return text(count, " ", what, count == 1 ? "" : "s");
}

// Headers alone: weights take minutes to read.
std::string look_at_model(const std::string& directory) {
  const ModelConfig shape = read_model_config(directory);
  const ModelWeights weights(directory);
  const std::vector<std::string> names = weights.names();
  int64_t bytes = 0;
  for (const std::string& name : names)
    bytes += static_cast<int64_t>(weights.view(name).bytes.size());
  return text(shape.layers, " layers, ", count_text(names.size(), "tensor"), " of ", size_text(bytes));
}

// The first byte of each: what is there need not be readable.
std::string look_at_documents(const std::vector<std::string>& files) {
  int64_t bytes = 0;
  for (const std::string& file : files) {
    const InputFile input = open_input(file);
    if (input.size_bytes == 0)
      throw UserError("the document is empty", file, "remove it from the list, or fill it");
    std::array<std::byte, 1> first{};
    read_exactly(input.descriptor, 0, first, file);
    bytes += input.size_bytes;
  }
  return text(count_text(files.size(), "document"), " of ", size_text(bytes));
}

Finding looked_at(const std::string& check, const std::string& place,
                  const std::function<std::string()>& look) {
  constexpr const char* kWanted = "can be read";
  try {
    return {check, Scope::kHost, place, look(), kWanted, Verdict::kPass, "", {}};
  } catch (const std::exception& error) {
    Finding row = failed_check(check, Scope::kHost, error);
    row.place = place;
    row.wanted = kWanted;
    return row;
  }
}

Finding skipped(const std::string& check, const std::string& why) {
  return {check, Scope::kJob, "", why, "", Verdict::kSkipped, "", {}};
}

bool generates(const Config& config) {
  return std::count(config.tasks.begin(), config.tasks.end(), Task::kGenerate) > 0;
}

bool has_tokenizer(const Config& config) {
  std::error_code error;
  return !config.model.path.empty() && fs::exists(tokenizer_file(config.model.path), error);
}

// Tokens alone need none, but where there is one the job reads it.
bool reads_tokenizer(const Config& config) {
  if (!config.input.documents.empty() || generates(config)) return !config.model.path.empty();
  return !config.input.tokens.empty() && has_tokenizer(config);
}

std::string look_at_tokens(const Config& config, Reader reader) {
  const std::string& file = config.input.tokens;
  const TokenFile tokens(file);
  if (tokens.documents() == 0)
    throw UserError("the token file holds no document", file, "make it again with at least one text file");
  if (reader == Reader::kRoot && has_tokenizer(config))
    refuse_other_tokenizer(tokens, file, config.model.path);
  int64_t all = 0;
  for (int64_t i = 0; i < tokens.documents(); ++i)
    all += tokens.document_tokens(i);
  return text(count_text(static_cast<size_t>(tokens.documents()), "document"), " of ", all, " tokens");
}

std::vector<Finding> look_at_texts(const Config& config) {
  std::vector<Finding> rows;
  const Config::Input& input = config.input;
  if (reads_tokenizer(config))
    rows.push_back(looked_at("tokenizer", config.model.path, [&] {
      return text(Tokenizer::load(config.model.path)->vocabulary_size(), " tokens");
    }));
  if (!input.prompts_file.empty() && (generates(config) || config.tasks.empty()))
    rows.push_back(looked_at("prompts", input.prompts_file, [&] {
      return count_text(read_prompts(input.prompts_file).texts.size(), "prompt");
    }));
  if (!input.documents.empty())
    rows.push_back(looked_at("input", "input.documents", [&] { return look_at_documents(input.documents); }));
  else if (input.tokens.empty())
    rows.push_back(skipped("input", "neither input.documents nor input.tokens is set"));
  return rows;
}

}  // namespace

std::vector<Finding> examine_inputs(const Config& config, Reader reader) {
  std::vector<Finding> rows;
  const Config::Model& model = config.model;
  const bool is_root = reader == Reader::kRoot;
  if (model.weights == WeightsSource::kCheckpoint && !model.path.empty())
    rows.push_back(looked_at("model", model.path, [&] { return look_at_model(model.path); }));
  else if (is_root)
    rows.push_back(
        skipped("model", model.path.empty() ? "model.path is not set" : "model.weights is random"));
  if (!config.input.tokens.empty()) {
    rows.push_back(looked_at("input", config.input.tokens, [&] { return look_at_tokens(config, reader); }));
    Finding& row = rows.back();
    if (!is_root && !config.tasks.empty() && row.verdict == Verdict::kFail) {
      row.verdict = Verdict::kWarn;
      row.wanted = "can be read, by a training";
    }
  }
  if (is_root)
    for (Finding& row : look_at_texts(config))
      rows.push_back(std::move(row));
  return rows;
}

}  // namespace longhalo

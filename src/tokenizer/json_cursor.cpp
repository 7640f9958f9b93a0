#include "tokenizer/json_cursor.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 30;  // the largest tokenizers have some ten million
constexpr const char* kFetchAgain = "fetch the file again from where the model came from";

}  // namespace

std::string read_whole_file(const std::filesystem::path& file) {
  return read_text_file(file, kMostBytes);
}

nlohmann::json read_json_file(const std::filesystem::path& file) {
  const std::string content = read_json_text(file, kMostBytes);
  try {
    return nlohmann::json::parse(content);
  } catch (const nlohmann::json::exception& error) {
    throw UserError(text("the file is not valid JSON: ", error.what()), file.string(), kFetchAgain);
  }
}

JsonCursor JsonCursor::operator[](std::string_view key) const {
  const nlohmann::json& members = object();
  const auto member = members.find(key);
  if (member == members.end()) fail(text("the key \"", key, "\" is missing"), kFetchAgain);
  return {&*member, file_, path_.empty() ? std::string(key) : text(path_, ".", key)};
}

std::optional<JsonCursor> JsonCursor::find(std::string_view key) const {
  const nlohmann::json& members = object();
  const auto member = members.find(key);
  if (member == members.end() || member->is_null()) return std::nullopt;
  return (*this)[key];
}

JsonCursor JsonCursor::at(size_t index) const {
  return {&array().at(index), file_, text(path_, "[", index, "]")};
}

size_t JsonCursor::size() const {
  return array().size();
}

std::string JsonCursor::string() const {
  if (!value_->is_string()) fail(text("a string is needed here, not ", value_->type_name()), kFetchAgain);
  return value_->get<std::string>();
}

bool JsonCursor::boolean() const {
  if (!value_->is_boolean())
    fail(text("true or false is needed here, not ", value_->type_name()), kFetchAgain);
  return value_->get<bool>();
}

int64_t JsonCursor::integer() const {
  const bool fits =
      value_->is_number_integer() &&
      (!value_->is_number_unsigned() || value_->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
  if (!fits) fail("a whole number is needed here", kFetchAgain);
  return value_->get<int64_t>();
}

double JsonCursor::number() const {
  if (!value_->is_number()) fail(text("a number is needed here, not ", value_->type_name()), kFetchAgain);
  return value_->get<double>();
}

bool JsonCursor::boolean_or(std::string_view key, bool fallback) const {
  const auto member = find(key);
  return member ? member->boolean() : fallback;
}

const nlohmann::json& JsonCursor::object() const {
  if (!value_->is_object()) fail(text("an object is needed here, not ", value_->type_name()), kFetchAgain);
  return *value_;
}

const nlohmann::json& JsonCursor::array() const {
  if (!value_->is_array()) fail(text("an array is needed here, not ", value_->type_name()), kFetchAgain);
  return *value_;
}

void JsonCursor::only_keys(std::initializer_list<std::string_view> known) const {
  for (const auto& member : object().items()) {
    if (std::find(known.begin(), known.end(), member.key()) == known.end()) {
      unsupported(text("the key \"", member.key(), "\""));
    }
  }
}

void JsonCursor::fail(std::string_view what, std::string_view remedy) const {
  throw UserError(what, where(), remedy);
}

void JsonCursor::unsupported(std::string_view what) const {
  throw UserError(text(what, " is not supported"), where(),
                  "use a byte-level BPE tokenizer.json like those of GPT-2, Llama-3, Qwen2 or SmolLM2, or a "
                  "SentencePiece tokenizer.model");
}

std::string JsonCursor::where() const {
  return path_.empty() ? file_ : text(file_, " at ", path_);
}

}  // namespace longhalo

// A value inside a JSON file that knows where it is, so that every complaint names file and JSON path
// ("models/x/tokenizer.json at pre_tokenizer.pretokenizers[1].type").
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace longhalo {

/// The bytes of a file. Throws UserError if it cannot be read.
std::string read_whole_file(const std::filesystem::path& file);

/// Reads and parses a whole file. Throws UserError if it cannot be read or is not JSON.
nlohmann::json read_json_file(const std::filesystem::path& file);

class JsonCursor {
 public:
  /// The root. `root` must outlive the cursor.
  JsonCursor(const nlohmann::json& root, std::string file) : value_(&root), file_(std::move(file)) {}

  /// The member `key`, which must be there.
  JsonCursor operator[](std::string_view key) const;
  /// The member `key` if it is there and not null.
  std::optional<JsonCursor> find(std::string_view key) const;
  /// Element `index` of an array.
  JsonCursor at(size_t index) const;
  /// Number of elements; the value must be an array.
  size_t size() const;

  std::string string() const;
  bool boolean() const;
  int64_t integer() const;
  double number() const;
  bool boolean_or(std::string_view key, bool fallback) const;

  const nlohmann::json& object() const;
  const nlohmann::json& array() const;
  bool is_number() const { return value_->is_number(); }
  bool is_string() const { return value_->is_string(); }

  /// Refuses every member that is not in `known`: a key that is not understood may change the result.
  void only_keys(std::initializer_list<std::string_view> known) const;

  /// Throws UserError about this value.
  [[noreturn]] void fail(std::string_view what, std::string_view remedy) const;
  /// Throws UserError about something that LongHalo does not do.
  [[noreturn]] void unsupported(std::string_view what) const;

  std::string where() const;

 private:
  JsonCursor(const nlohmann::json* value, std::string file, std::string path)
      : value_(value), file_(std::move(file)), path_(std::move(path)) {}

  const nlohmann::json* value_;
  std::string file_;
  std::string path_;
};

}  // namespace longhalo

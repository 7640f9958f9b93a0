// Small tokenizers made by hand: all bytes, a few merges, and whatever a test changes.
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/error.hpp"
#include "tokenizer/tokenizer.hpp"

namespace longhalo::test {

/// A folder of its own, removed with everything in it at the end.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void write(const std::string& name, std::string_view content) const;

 private:
  std::filesystem::path path_;
};

/// A whole tokenizer.json: ids 0-255 are the bytes in order, then "aa", "aaaa", two and four spaces, "ab",
/// "cab", then <|s|> (special) and <add> (added, not special).
nlohmann::json tiny_description();

enum TinyId : int32_t { kA2 = 256, kA4, kSpace2, kSpace4, kAb, kCab, kSpecial, kAdded };

/// Pre-tokenizers of the models in use, by name: "gpt2", "smollm2", "llama3", "qwen2".
nlohmann::json pre_tokenizer(std::string_view name);

std::unique_ptr<Tokenizer> load_description(const nlohmann::json& description);

/// The message of the UserError that `action` throws; empty if it throws none.
template <class Action>
std::string user_error_of(Action action) {
  try {
    action();
  } catch (const UserError& error) {
    return error.what();
  }
  return {};
}

}  // namespace longhalo::test

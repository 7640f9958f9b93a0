// What tests of the config share: a file that goes away, and a look at messages.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/config.hpp"
#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo::test {

using Environment = std::vector<std::pair<std::string, std::string>>;

/// A file that goes away with the test.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string_view content) {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    path_ =
        std::filesystem::temp_directory_path() / text("longhalo_", test->name(), "_", ::getpid(), ".yaml");
    std::ofstream(path_, std::ios::binary) << content;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline testing::AssertionResult holds(const std::string& message, std::string_view part) {
  if (message.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << part << "' is not in:\n" << message;
}

/// The message of the UserError, or "" where loading succeeds.
inline std::string message_of(Subcommand subcommand, std::string_view yaml) {
  try {
    load_config_text(subcommand, yaml, "x.yaml");
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

inline std::string message_of(Subcommand subcommand, const ConfigSources& sources) {
  try {
    load_config(subcommand, sources);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

inline int count_faults(const std::string& message) {
  int count = 0;
  for (size_t at = message.find("\n    "); at != std::string::npos; at = message.find("\n    ", at + 1))
    ++count;
  return count;
}

}  // namespace longhalo::test

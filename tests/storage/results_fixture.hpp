// What tests of results share: records as they are made, and as they lie on the disk.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "scratch.hpp"

namespace longhalo::testing {

inline nlohmann::json record_of(const std::string& document, const std::string& query = "",
                                const std::string& task = "generate") {
  return {{"document", document}, {"query", query}, {"task", task}};
}

// Every line has to be a whole record; the last line too has to end in a newline.
inline std::vector<nlohmann::json> records_in(const std::filesystem::path& directory) {
  const std::string contents = read_text(directory / "results.jsonl");
  std::vector<nlohmann::json> records;
  size_t begin = 0;
  for (size_t end; (end = contents.find('\n', begin)) != std::string::npos; begin = end + 1) {
    records.push_back(nlohmann::json::parse(contents.substr(begin, end - begin)));
  }
  EXPECT_EQ(begin, contents.size()) << "half a record: " << contents.substr(begin);
  return records;
}

}  // namespace longhalo::testing

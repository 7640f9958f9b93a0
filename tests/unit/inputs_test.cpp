// What a job takes of its documents before it reads them.
#include "app/inputs.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "../storage/scratch.hpp"

namespace longhalo {
namespace {

// Documents of these lengths: ids count on from 0 through all of them.
Inputs inputs_of(const std::vector<int64_t>& lengths) {
  const testing::ScratchFolder folder;
  const std::filesystem::path file = folder / "tokens.h5";
  TokenFileWriter writer(file, {100000, "", ""});
  int32_t next = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    std::vector<int32_t> tokens(static_cast<size_t>(lengths[i]));
    std::iota(tokens.begin(), tokens.end(), next);
    next += static_cast<int32_t>(tokens.size());
    writer.append_document("document " + std::to_string(i), tokens);
  }
  writer.commit();
  Config config;
  config.tasks = {Task::kScore};
  config.input.tokens = file;
  return {config, 100000};  // which keeps the file open
}

TEST(Inputs, BeginningsAreSharedAmongTheFirstDocuments) {
  EXPECT_EQ(inputs_of({5, 20, 9}).beginnings(9), (std::vector<int32_t>{0, 1, 2, 5, 6, 7, 25, 26, 27}));
  EXPECT_EQ(inputs_of({2, 20}).beginnings(8), (std::vector<int32_t>{0, 1, 2, 3, 4, 5}));  // one is short
  EXPECT_EQ(inputs_of({5}).beginnings(3), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(inputs_of({5}).beginnings(100), (std::vector<int32_t>{0, 1, 2, 3, 4}));
  const std::vector<int64_t> many(12, 10);
  EXPECT_EQ(inputs_of(many).beginnings(16),
            (std::vector<int32_t>{0, 1, 10, 11, 20, 21, 30, 31, 40, 41, 50, 51, 60, 61, 70, 71}));
}

}  // namespace
}  // namespace longhalo

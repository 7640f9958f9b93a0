// What the log writes of texts that others chose.
#include "core/log.hpp"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace longhalo {
namespace {

using std::literals::operator""sv;

TEST(Log, NothingThatATerminalWouldObey) {
  ::testing::internal::CaptureStderr();
  log_error("shard '\x1b]0;title\a\x7f\0' of gr\u00f6\u00dfe\n  where:\tmodel"sv);
  const std::string line = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(
      line.find("longhalo error: shard '\\x1b]0;title\\x07\\x7f\\x00' of gr\u00f6\u00dfe\n  where:\tmodel\n"),
      std::string::npos)
      << line;
}

}  // namespace
}  // namespace longhalo

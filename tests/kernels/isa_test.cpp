// Which instruction set the kernels run with.
#include "kernels/common/isa.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "core/error.hpp"
#include "with_isa.hpp"

namespace longhalo::testing {
namespace {

TEST(InstructionSet, BaselineIsAlwaysThere) {
  EXPECT_TRUE(isa_available(Isa::kBaseline));
  EXPECT_TRUE(isa_available(current_isa()));
}

TEST(InstructionSet, OverrideTakesWhatTheCpuHas) {
  const Isa before = current_isa();
  for (Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (isa_available(isa)) {
      use_isa(isa);
      EXPECT_EQ(current_isa(), isa);
    } else {
      EXPECT_THROW(use_isa(isa), InvariantError);
    }
  }
  use_isa(before);
}

// The environment is read once, so each word is tried in a process of its own.
int choose_with(const char* word) {
  setenv("LONGHALO_ISA", word, 1);
  try {
    return current_isa() == Isa::kBaseline ? 0 : 3;
  } catch (const UserError& error) {
    return std::string(error.what()).find("LONGHALO_ISA") != std::string::npos ? 2 : 4;
  }
}

TEST(InstructionSetDeathTest, EnvironmentChooses) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(std::_Exit(choose_with("baseline")), ::testing::ExitedWithCode(0), "");
}

TEST(InstructionSetDeathTest, UnknownWordIsAUserError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(std::_Exit(choose_with("avx9000")), ::testing::ExitedWithCode(2), "");
}

}  // namespace
}  // namespace longhalo::testing

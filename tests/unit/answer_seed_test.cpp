// Seeds of sampled answers: each of its own, and no bits in common with its neighbours'.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <set>

#include "app/answers.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

TEST(SeedOfAnswer, EachAnswerHasItsOwn) {
  std::set<uint64_t> seeds;
  for (int64_t seed = 0; seed < 10; ++seed)
    for (int document = 0; document < 100; ++document)
      for (int prompt = 0; prompt < 10; ++prompt)
        seeds.insert(seed_of_answer(seed, text("part_", document, ".txt"), text("Question ", prompt, "?")));
  EXPECT_EQ(seeds.size(), 10000);
  EXPECT_NE(seed_of_answer(1, "ab", "c"), seed_of_answer(1, "a", "bc"));
  EXPECT_NE(seed_of_answer(1, "", "abc"), seed_of_answer(1, "abc", ""));
  EXPECT_EQ(seed_of_answer(7, "a.txt", "What?"), seed_of_answer(7, "a.txt", "What?"));
}

// Of 64 fair bits, 32 differ with a deviation of 4; the mean of 3000 pairs deviates by 0.073. Allowed are
// five deviations of that mean.
TEST(SeedOfAnswer, NeighboursDifferInHalfTheirBits) {
  int64_t differing = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    const uint64_t own = seed_of_answer(i, text("doc", i), text("ask", i));
    differing += std::popcount(own ^ seed_of_answer(i + 1, text("doc", i), text("ask", i)));
    differing += std::popcount(own ^ seed_of_answer(i, text("doc", i + 1), text("ask", i)));
    differing += std::popcount(own ^ seed_of_answer(i, text("doc", i), text("ask", i + 1)));
  }
  EXPECT_NEAR(static_cast<double>(differing) / 3000, 32, 5 * 4 / std::sqrt(3000.));
}

}  // namespace
}  // namespace longhalo

// The attention kernel against the fp64 reference, with every instruction set that this CPU has.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "attention_problem.hpp"
#include "kernels/common/isa.hpp"
#include "kernels/matmul/matmul.hpp"
#include "with_isa.hpp"

namespace longhalo::testing {
namespace {

class AttentionKernel : public WithIsa {};

TEST_P(AttentionKernel, AgreesWithTheReferenceOnRandomProblems) {
  for (unsigned seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    const AttentionProblem p = random_problem(seed);
    expect_right(p, run_kernel(p));
    if (HasFailure()) return;
  }
}

TEST_P(AttentionKernel, EveryHeadDimensionThatIsAMultipleOfEight) {
  for (int64_t d = 8; d <= 256; d += 8) {
    AttentionProblem p;
    p.heads = 4, p.kv_heads = 2, p.head_dim = d, p.queries = 33, p.first_query = 20;
    p.landmark_bias = {-1, 0.5F, -3, 2};
    add_band_of_history(p, {1, 0, 24});
    add_band_of_history(p, {8, 24, kUnlimited});
    fill(p, static_cast<unsigned>(d));
    expect_right(p, run_kernel(p));
  }
}

// Several query tiles and many key tiles, with lengths at and beside the edges of both.
TEST_P(AttentionKernel, LongerThanOneTile) {
  for (int64_t n : {95, 96, 97, 383, 384, 385}) {
    AttentionProblem p;
    p.heads = 2, p.kv_heads = 2, p.head_dim = 64, p.queries = n, p.first_query = 3;
    add_band_of_history(p, {1, 0, 192});
    add_band_of_history(p, {16, 192, kUnlimited});
    fill(p, static_cast<unsigned>(n));
    expect_right(p, run_kernel(p));
  }
}

TEST_P(AttentionKernel, DecodeStepsOverLongContexts) {
  for (int64_t n : {1, 2, 3, 5, 8}) {
    AttentionProblem p;
    p.heads = 6, p.kv_heads = 2, p.head_dim = 64, p.queries = n, p.first_query = 3000;
    p.landmark_bias = {-3, -2, -1, 0, 1, 2};
    add_band_of_history(p, {1, 0, 2048});
    add_band_of_history(p, {64, 2048, kUnlimited});
    fill(p, static_cast<unsigned>(n));
    expect_right(p, run_kernel(p));
  }
}

TEST_P(AttentionKernel, RowsThatSeeNothingGiveZero) {
  for (int64_t n : {3, 40}) {
    AttentionProblem p;
    p.heads = 2, p.kv_heads = 1, p.head_dim = 16, p.queries = n;
    add_band_of_history(p, {1, 30, 35});
    add_band(p, {8, 0, kUnlimited}, 0, 0);
    fill(p, 7);
    const AttentionAnswer answer = run_kernel(p);
    expect_right(p, answer);
    for (int64_t row = 0; row < std::min<int64_t>(n, 30); ++row) {
      for (int64_t at = row * 32; at < (row + 1) * 32; ++at)
        ASSERT_EQ(answer.out[static_cast<size_t>(at)], 0.0F);
      ASSERT_EQ(answer.lse[static_cast<size_t>(row)], -std::numeric_limits<float>::infinity());
    }
  }
}

// With equal scores the answer is the mean of the values seen; the values encode their positions, so every
// row says exactly which keys it used.
TEST_P(AttentionKernel, TheMeanOfTheKeysSeenIsExact) {
  AttentionProblem p;
  p.heads = 3, p.kv_heads = 1, p.head_dim = 8, p.queries = 300;
  const int64_t window = 128;
  add_band_of_history(p, {1, 0, window});
  fill(p, 1);
  std::fill(p.q.begin(), p.q.end(), 0.0F);
  OwnedBand& band = p.bands[0];
  for (size_t at = 0; at < band.v.size(); ++at)
    band.v[at] = static_cast<float>(at / 8);
  const AttentionAnswer answer = run_kernel(p);
  for (int64_t i = 0; i < p.queries; ++i) {
    const int64_t first = std::max<int64_t>(0, i - window + 1);
    const float count = static_cast<float>(i - first + 1);
    // Sums of at most 128 whole numbers below 300 are exact in fp32; the division is two roundings.
    ASSERT_NEAR(answer.out[static_cast<size_t>(i * 24)], static_cast<float>(first + i) / 2, 2e-7F * 300);
    ASSERT_NEAR(answer.lse[static_cast<size_t>(i)], std::log(count), 1e-6F);
  }
}

TEST_P(AttentionKernel, ScoresOfAnySizeStayFinite) {
  AttentionProblem p;
  p.heads = 2, p.kv_heads = 1, p.head_dim = 64, p.queries = 70;
  add_band_of_history(p, {1, 0, 50});
  fill(p, 3);
  for (float& x : p.q)
    x *= 1000.0F;  // scores of thousands: one key takes all, exp of the others underflows
  expect_right(p, run_kernel(p));
}

INSTANTIATE_TEST_SUITE_P(Cpu, AttentionKernel, all_isas(), isa_test_name);

}  // namespace
}  // namespace longhalo::testing

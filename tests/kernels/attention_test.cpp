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

int64_t pick(std::mt19937& random, const std::vector<int64_t>& from) {
  return from[random() % from.size()];
}

// Documents of odd lengths, some of one token, from a start at or before the first query.
std::vector<int64_t> documents(std::mt19937& random, int64_t first_query, int64_t n) {
  std::vector<int64_t> starts;
  int64_t start = std::max<int64_t>(0, first_query - static_cast<int64_t>(random() % 40));
  int64_t next = first_query + 1 + static_cast<int64_t>(random() % 20);
  for (int64_t i = first_query; i < first_query + n; ++i) {
    if (i == next) {
      start = i;
      next = i + (random() % 3 == 0 ? 1 : 1 + static_cast<int64_t>(random() % 60));
    }
    starts.push_back(start);
  }
  return starts;
}

// Every feature drawn at random: shapes, bands (with gaps, strided from distance 0, of finite reach, empty
// ones), key arrays that begin late and end early, packed documents, queries far into a document.
AttentionProblem random_problem(unsigned seed) {
  std::mt19937 random(seed);
  AttentionProblem p;
  const int64_t group = 1 + static_cast<int64_t>(random() % 8);
  p.head_dim = pick(random, {8, 16, 40, 64, 64, 80, 96, 128});
  p.kv_heads = pick(random, {1, 1, 2, 3});
  p.heads = group * p.kv_heads;
  p.queries = pick(random, {1, 2, 3, 8, 9, 31, 47, 64, 97, 127, 128, 129});
  p.first_query = pick(random, {0, 0, 1, 63, 95, 96, 97, 200, 10'000'000});
  const int64_t window = pick(random, {1, 2, 7, 32, 95, 96, 97, 128});
  const int64_t stride = pick(random, {2, 3, 8, 16, 32});
  // At a huge position an unlimited band would have millions of keys; a far one stands for it.
  const int64_t unlimited = p.first_query > 1000 ? stride * 50 + window : kUnlimited;
  const std::vector<std::vector<Band>> choices{
      {{1, 0, window}},
      {{1, 0, p.first_query > 1000 ? 300 : kUnlimited}},
      {{1, 0, window}, {stride, window, unlimited}},
      {{stride, 0, unlimited}},
      {{1, 0, window}, {stride, window + 5, window + 5 * stride}},
      {{1, 3, 3 + window}, {2, window, 3 * window}, {stride, 2 * window, unlimited}},
      {{1, 0, window},
       {2, window, 2 * window + 2},
       {4, 2 * window, 4 * window + 4},
       {stride, 4 * window, unlimited}},
      {{1, 7, 7}, {stride, 2 * window, unlimited}}};
  for (const Band& band : choices[random() % choices.size()])
    add_band_of_history(p, band, pick(random, {0, 0, 0, 1, 5}), pick(random, {0, 0, 0, 1, 3}));
  if (random() % 4 == 0) p.bands.back().count = 0;
  if (random() % 3 == 0) p.doc_start = documents(random, p.first_query, p.queries);
  if (random() % 2 == 0) {
    p.landmark_bias.resize(static_cast<size_t>(p.heads));
    for (float& x : p.landmark_bias)
      x = -3.0F + static_cast<float>(random() % 100) / 50.0F;
  }
  fill(p, seed + 1000);
  return p;
}

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

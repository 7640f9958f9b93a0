// Attention's gradient: the fp64 reference against central differences of the forward reference, and the
// kernel against the fp64 reference with every instruction set that this CPU has.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "attention_gradient_problem.hpp"
#include "differences.hpp"
#include "with_isa.hpp"

namespace longhalo::testing {
namespace {

class AttentionBackward : public WithIsa {};

std::vector<float> output_gradient(const AttentionProblem& p, unsigned seed) {
  return normal(p.queries * p.heads * p.head_dim, seed);
}

TEST(AttentionBackwardReference, IsTheSlopeOfTheForwardReference) {
  for (int shape = 0; shape < 4; ++shape) {
    AttentionProblem p;
    p.heads = shape == 1 ? 3 : 4, p.kv_heads = shape == 1 ? 1 : 2, p.head_dim = 8;
    p.queries = 7, p.first_query = shape == 0 ? 0 : 11;
    p.landmark_bias.assign(static_cast<size_t>(p.heads), -0.5F);
    add_band_of_history(p, {1, 0, 5}, shape == 2 ? 3 : 0);
    if (shape > 0) add_band_of_history(p, {2, 5, shape == 3 ? 9 : kUnlimited});
    if (shape == 3) add_band_of_history(p, {3, 9, kUnlimited}, 0, 1);
    if (shape == 2) p.doc_start = {4, 4, 13, 13, 13, 16, 16};
    fill(p, static_cast<unsigned>(shape + 1));
    std::vector<double> q = upcast(p.q), bias = upcast(p.landmark_bias);
    const std::vector<double> d_out = upcast(output_gradient(p, 9));
    std::vector<std::vector<double>> k, v;
    for (const OwnedBand& b : p.bands)
      k.push_back(upcast(b.k)), v.push_back(upcast(b.v));
    std::vector<BandKeys<double>> keys;
    for (size_t b = 0; b < k.size(); ++b)
      keys.push_back({p.bands[b].band, k[b].data(), v[b].data(), p.bands[b].first_key, p.bands[b].count});
    Attention<double> a;
    a.heads = p.heads, a.kv_heads = p.kv_heads, a.head_dim = p.head_dim, a.scale = p.scale();
    a.queries = p.queries, a.first_query = p.first_query, a.q = q.data(), a.bands = keys;
    a.landmark_bias = bias.data();
    a.doc_start = p.doc_start.empty() ? nullptr : p.doc_start.data();
    const GradientJudgement right = judge_backward(p, output_gradient(p, 9));
    const auto loss = [&] {
      std::vector<double> out(d_out.size());
      a.out = out.data();
      attention_reference(a);
      return inner_product(out, d_out);
    };
    expect_slope(loss, q, right.dq, "dq");
    for (size_t b = 0; b < k.size(); ++b) {
      expect_slope(loss, k[b], right.dk[b], "dk");
      expect_slope(loss, v[b], right.dv[b], "dv");
    }
    expect_slope(loss, bias, right.d_bias, "d_landmark_bias");
    if (HasFatalFailure()) FAIL() << "shape " << shape;
  }
}

TEST(AttentionBackwardKernel, AgreesWithTheReferenceOnRandomProblems) {
  const Isa before = current_isa();
  for (unsigned seed = 1; seed <= 60 && !::testing::Test::HasFailure(); ++seed) {
    const AttentionProblem p = random_problem(seed);
    const std::vector<float> d_out = output_gradient(p, seed + 2000);
    const GradientJudgement right = judge_backward(p, d_out);
    for (Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
      if (!isa_available(isa)) continue;
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << isa_name(isa));
      use_isa(isa);
      expect_right(p, run_backward(p, d_out), right);
    }
  }
  use_isa(before);
}

TEST_P(AttentionBackward, EveryHeadDimensionThatIsAMultipleOfEight) {
  for (int64_t d = 8; d <= 256; d += 8) {
    AttentionProblem p;
    p.heads = 4, p.kv_heads = 2, p.head_dim = d, p.queries = 33, p.first_query = 20;
    p.landmark_bias = {-1, 0.5F, -3, 2};
    add_band_of_history(p, {1, 0, 24});
    add_band_of_history(p, {8, 24, kUnlimited});
    fill(p, static_cast<unsigned>(d));
    const std::vector<float> d_out = output_gradient(p, 5);
    expect_right(p, run_backward(p, d_out), judge_backward(p, d_out));
  }
}

double relative(const std::vector<float>& got, const std::vector<double>& right) {
  double error = 0, size = 0;
  for (size_t at = 0; at < got.size(); ++at) {
    error += std::pow(got[at] - right[at], 2);
    size += std::pow(right[at], 2);
  }
  return std::sqrt(error / size);
}

// Several query tiles and many key tiles, with lengths at and beside the edges of both, in one call and by
// portions that add up.
TEST_P(AttentionBackward, LongerThanOneTile) {
  for (int64_t n : {127, 128, 129, 255, 256, 257}) {
    AttentionProblem p;
    p.heads = 4, p.kv_heads = 2, p.head_dim = 64, p.queries = n, p.first_query = 3;
    p.landmark_bias = {-1, 0, 1, 2};
    add_band_of_history(p, {1, 0, 96});
    add_band_of_history(p, {16, 96, kUnlimited});
    fill(p, static_cast<unsigned>(n));
    const std::vector<float> d_out = output_gradient(p, 6);
    const GradientJudgement right = judge_backward(p, d_out);
    for (int64_t portion : {n, int64_t{100}}) {
      const GradientAnswer got = run_backward(p, d_out, portion);
      expect_right(p, got, right);
      EXPECT_LE(relative(got.dq, right.dq), 1e-4);
      EXPECT_LE(relative(got.d_bias, right.d_bias), 1e-4);
      for (size_t b = 0; b < 2; ++b) {
        EXPECT_LE(relative(got.dk[b], right.dk[b]), 1e-4);
        EXPECT_LE(relative(got.dv[b], right.dv[b]), 1e-4);
      }
    }
  }
}

// What no query sees is not read, and rows that see nothing give nothing, whatever stands there.
TEST_P(AttentionBackward, WhatIsNotSeenDoesNotCount) {
  AttentionProblem p;
  p.heads = 4, p.kv_heads = 2, p.head_dim = 16, p.queries = 150;
  add_band(p, {1, 20, 50}, 0, 150);
  add_band(p, {8, 60, kUnlimited}, 0, 18);
  fill(p, 7);
  const std::vector<float> d_out = output_gradient(p, 8);
  const GradientAnswer clean = run_backward(p, d_out);
  expect_right(p, clean, judge_backward(p, d_out));
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const int64_t row = 2 * 16;
  for (auto* x : {&p.bands[0].k, &p.bands[0].v})  // the last query is 149: it sees [100, 129]
    std::fill(x->begin() + 130 * row, x->end(), kNan);
  for (auto* x : {&p.bands[1].k, &p.bands[1].v})  // and landmarks that begin at 89 or before
    std::fill(x->begin() + 12 * row, x->end(), kNan);
  std::vector<float> poisoned = d_out;
  std::fill(poisoned.begin(), poisoned.begin() + int64_t{20} * 4 * 16, kNan);
  const GradientAnswer got = run_backward(p, poisoned);
  EXPECT_EQ(got.dq, clean.dq);
  EXPECT_EQ(got.dk, clean.dk);
  EXPECT_EQ(got.dv, clean.dv);
  EXPECT_EQ(got.d_bias, clean.d_bias);
  EXPECT_TRUE(
      std::all_of(got.dq.begin(), got.dq.begin() + int64_t{20} * 4 * 16, [](float x) { return x == 0; }));
}

// A key that is not a number spoils the rows that see it and the keys that those see, and nothing else, even
// within one block of rows.
TEST_P(AttentionBackward, WhatIsNotANumberStaysWithTheRowsThatSeeIt) {
  AttentionProblem p;
  p.heads = 2, p.kv_heads = 1, p.head_dim = 16, p.queries = 120;
  add_band(p, {1, 0, 30}, 0, 120);
  fill(p, 7);
  const std::vector<float> d_out = output_gradient(p, 8);
  const GradientAnswer clean = run_backward(p, d_out);
  for (auto* x : {&p.bands[0].k, &p.bands[0].v}) {
    const std::vector<float> before = *x;
    std::fill_n(x->begin() + 40 * 16, 16, std::numeric_limits<float>::quiet_NaN());  // seen by rows 40 to 69
    const GradientAnswer got = run_backward(p, d_out);
    *x = before;
    for (size_t row = 0; row < 120; ++row) {
      const size_t dq = row * 32, dk = row * 16;
      EXPECT_EQ(std::isnan(got.dq[dq]), row >= 40 && row < 70) << row;
      EXPECT_EQ(std::isnan(got.dk[0][dk]), row >= 11 && row < 70) << row;  // row 40 sees keys from 11 on
      if (row < 40 || row >= 70) {
        EXPECT_EQ(got.dq[dq], clean.dq[dq]) << row;
      }
      if (row < 11 || row >= 70) {
        EXPECT_EQ(got.dk[0][dk], clean.dk[0][dk]) << row;
        EXPECT_EQ(got.dv[0][dk], clean.dv[0][dk]) << row;
      }
    }
  }
}

TEST_P(AttentionBackward, ScoresOfAnySizeStayFinite) {
  AttentionProblem p;
  p.heads = 2, p.kv_heads = 1, p.head_dim = 64, p.queries = 70;
  add_band_of_history(p, {1, 0, 50});
  fill(p, 3);
  for (float& x : p.q)
    x *= 100.0F;  // scores of hundreds: one key takes all, exp of the others underflows
  const std::vector<float> d_out = output_gradient(p, 8);
  expect_right(p, run_backward(p, d_out), judge_backward(p, d_out));
}

// One KV head and many query tiles: threads meet at every key tile.
TEST_P(AttentionBackward, SameBitsForAnyNumberOfThreads) {
  for (int64_t kv_heads : {1, 3}) {
    AttentionProblem p;
    p.heads = 3 * kv_heads, p.kv_heads = kv_heads, p.head_dim = 16, p.queries = 1500, p.first_query = 40;
    p.landmark_bias.assign(static_cast<size_t>(p.heads), -1);
    add_band_of_history(p, {1, 0, 200});
    add_band_of_history(p, {8, 200, kUnlimited});
    fill(p, 11);
    const std::vector<float> d_out = output_gradient(p, 12);
    GradientAnswer first;
    with_threads([&](int threads) {
      const GradientAnswer got = run_backward(p, d_out);
      if (threads == 1) first = got;
      EXPECT_EQ(got.dq, first.dq) << threads;
      EXPECT_EQ(got.dk, first.dk) << threads;
      EXPECT_EQ(got.dv, first.dv) << threads;
      EXPECT_EQ(got.d_bias, first.d_bias) << threads;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, AttentionBackward, all_isas(), isa_test_name);

}  // namespace
}  // namespace longhalo::testing

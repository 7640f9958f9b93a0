// The gradient of attention on the GPU against the fp64 reference. One body for all kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "attention_gpu_fixture.hpp"
#include "attention_gradient_gpu_problem.hpp"
#include "core/error.hpp"

namespace longhalo::testing {
namespace {

class GpuAttentionGradient : public AttentionKernelTest {
 protected:
  /// Fills the problem, rounds it to bf16, runs and judges.
  static void expect_kernel(AttentionProblem& p, unsigned seed, KeyLayout layout = KeyLayout::kDense) {
    p.units = units_of(seed);
    fill(p, seed);
    round_to_bfloat16(p);
    expect_gradient_right(p, seed + 500, GetParam(), stream(), layout);
  }
};

AttentionProblem shape(int64_t kv_heads, int64_t group, int64_t head_dim, int64_t first_query, int64_t n) {
  AttentionProblem p;
  p.kv_heads = kv_heads, p.heads = kv_heads * group, p.head_dim = head_dim;
  p.first_query = first_query, p.queries = n;
  return p;
}

// Documents of odd lengths, some of one token.
std::vector<int64_t> documents(int64_t first_query, int64_t n, int64_t longest, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int64_t> starts;
  int64_t start = std::max<int64_t>(0, first_query - 20), next = first_query + 7;
  for (int64_t i = first_query; i < first_query + n; ++i) {
    if (i == next) {
      start = i;
      next = i + (random() % 3 == 0 ? 1 : 1 + static_cast<int64_t>(random()) % longest);
    }
    starts.push_back(start);
  }
  return starts;
}

TEST_P(GpuAttentionGradient, AgreesWithTheReferenceOnRandomProblems) {
  for (unsigned seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    AttentionProblem p = random_problem(seed);
    p.head_dim = seed % 2 == 0 ? 64 : 128;
    expect_kernel(p, seed, static_cast<KeyLayout>(seed % 3));
    if (HasFailure()) return;
  }
}

TEST_P(GpuAttentionGradient, QueryCountsAndWindowsAtAndBesideTheEdgesOfTiles) {
  unsigned seed = 1;
  for (int64_t n : {1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 509}) {
    for (int64_t window : {1, 7, 100, 128, 300}) {
      AttentionProblem p = shape(1, 2, seed % 2 == 0 ? 64 : 128, n == 1 ? 700 : 0, n);
      add_band_of_history(p, {1, 0, window});
      add_band_of_history(p, {std::min<int64_t>(window, 48), window, kUnlimited});
      expect_kernel(p, seed++);
      if (HasFailure()) return;
    }
  }
}

TEST_P(GpuAttentionGradient, StridesOfLandmarks) {
  unsigned seed = 1;
  for (int64_t stride : {2, 3, 64, 100, 127, 128, 129, 300, 2048}) {
    for (int64_t first_query : {0, 5001}) {
      AttentionProblem p = shape(2, 2, seed % 2 == 0 ? 64 : 128, first_query, 199);
      add_band_of_history(p, {1, 0, std::min<int64_t>(stride, 150)});
      add_band_of_history(p, {stride, stride, kUnlimited});
      p.landmark_bias = {-3, 0, 1.5F, -0.25F};
      if (p.bands[1].count > 600) p.bands[1].first_key += p.bands[1].count - 600, p.bands[1].count = 600;
      expect_kernel(p, seed++);
      if (HasFailure()) return;
    }
  }
}

TEST_P(GpuAttentionGradient, GroupsOfOneToEightHeads) {
  for (int64_t d : {64, 128}) {
    for (int64_t group = 1; group <= 8; ++group) {
      AttentionProblem p = shape(group % 3 + 1, group, d, 77, 133);
      add_band_of_history(p, {1, 0, 96});
      add_band_of_history(p, {32, 96, kUnlimited});
      p.landmark_bias = normal_floats(p.heads, static_cast<unsigned>(group));
      expect_kernel(p, static_cast<unsigned>(d + group), KeyLayout::kInterleaved);
      if (HasFailure()) return;
    }
  }
}

TEST_P(GpuAttentionGradient, PyramidsOfFourBands) {
  for (int64_t first_query : {0, 20'000, 10'000'000}) {
    AttentionProblem p = shape(1, 3, 128, first_query, 259);
    add_band_of_history(p, {1, 0, 200});
    add_band_of_history(p, {16, 200, 3000});
    add_band_of_history(p, {100, 3000, 12'345});
    add_band_of_history(p, {2048, 12'345, 500'000});
    expect_kernel(p, 11, KeyLayout::kPadded);
  }
}

TEST_P(GpuAttentionGradient, PackedDocuments) {
  for (int64_t longest : {1, 2, 40, 400}) {
    AttentionProblem p = shape(1, 2, longest == 40 ? 128 : 64, 1000, 577);
    add_band_of_history(p, {1, 0, 256});
    add_band_of_history(p, {32, 256, kUnlimited});
    p.doc_start = documents(p.first_query, p.queries, longest, static_cast<unsigned>(longest));
    expect_kernel(p, static_cast<unsigned>(longest));
    if (HasFailure()) return;
  }
}

TEST_P(GpuAttentionGradient, KeyArraysThatBeginLateAndEndEarly) {
  for (int64_t missing : {1, 64, 129, 300}) {
    AttentionProblem p = shape(1, 4, 128, 3000, 300);
    add_band_of_history(p, {1, 0, 400}, missing, missing);
    add_band_of_history(p, {8, 400, kUnlimited}, missing, missing / 8);
    expect_kernel(p, static_cast<unsigned>(missing), KeyLayout::kPadded);
    if (HasFailure()) return;
  }
}

// d_out of such rows is large (GpuGradient) and must not reach the keys that other rows of the tile see.
TEST_P(GpuAttentionGradient, RowsThatSeeNothingGiveNothing) {
  for (int64_t d : {64, 128}) {
    for (int64_t n : {3, 31, 40, 300}) {
      AttentionProblem p = shape(1, 2, d, 0, n);
      p.units = n % 2 == 0 ? QueryUnits::kPlain : QueryUnits::kExponents;
      add_band_of_history(p, {1, 30, 65});
      add_band(p, {8, 40, kUnlimited}, 0, 0);
      fill(p, 7);
      round_to_bfloat16(p);
      expect_gradient_right(p, 8, GetParam(), stream());
      const int64_t width = p.heads * d;
      GpuGradient there(p, normal_floats(n * width, 8), stream());
      there.run(GetParam());
      const std::vector<double> dq = there.answer().dq;
      for (int64_t at = 0; at < std::min<int64_t>(n, 30) * width; ++at)
        ASSERT_EQ(dq[static_cast<size_t>(at)], 0) << "n " << n << " row " << at / width;
    }
  }
}

TEST_P(GpuAttentionGradient, ScoresOfAnySizeStayFinite) {
  for (float size : {100.0F, 1e-20F}) {
    for (QueryUnits units : {QueryUnits::kPlain, QueryUnits::kExponents}) {
      AttentionProblem p = shape(1, 2, 64, 0, 200);
      p.units = units;
      add_band_of_history(p, {1, 0, 1});  // one key in sight: only the bounds of each row are looked at
      p.bands[0].band.far = 150;
      fill(p, 3);
      for (float& x : p.q)
        x *= size;  // scores of hundreds: one key takes all, exp of the others underflows
      round_to_bfloat16(p);
      std::vector<float> d_out = normal_floats(p.queries * p.heads * p.head_dim, 9);
      for (float& x : d_out)
        x = to_float(to_bfloat16(x));
      GpuGradient there(p, d_out, stream());
      there.run(GetParam());
      const GradientJudgement got = there.answer(), right = judge_backward(p, d_out, kBf16Unit);
      for (size_t row = 0; row < right.dq_error.size(); ++row) {
        double squares = 0;
        for (size_t at = row * 64; at < (row + 1) * 64; ++at)
          squares += std::pow(got.dq[at] - right.dq[at], 2);
        ASSERT_LE(std::sqrt(squares), right.dq_error[row]) << "row " << row;
      }
      for (double x : got.dk[0])
        ASSERT_TRUE(std::isfinite(x));
    }
  }
}

// Longer, and without the bias as with it.
TEST_P(GpuAttentionGradient, ALongerSequence) {
  for (int64_t d : {64, 128}) {
    AttentionProblem p = shape(1, 4, d, 0, 1499);
    p.units = d == 128 ? QueryUnits::kExponents : QueryUnits::kPlain;
    add_band_of_history(p, {1, 0, 256});
    add_band_of_history(p, {64, 256, kUnlimited});
    p.landmark_bias = {-1, 0, 1, -2};
    fill(p, static_cast<unsigned>(d));
    round_to_bfloat16(p);
    std::vector<float> d_out = normal_floats(p.queries * p.heads * d, 6);
    expect_gradient_right(p, 6, GetParam(), stream());
    GpuGradient there(p, d_out, stream());
    there.run(GetParam());
    const GradientJudgement with = there.answer();
    there.run(GetParam(), false);
    const GradientJudgement without = there.answer();
    EXPECT_EQ(with.dq, without.dq);
    EXPECT_EQ(with.dk, without.dk);
    EXPECT_EQ(with.dv, without.dv);
    for (double x : without.d_bias)
      EXPECT_EQ(x, 0);
    for (float& x : d_out)
      x = to_float(to_bfloat16(x));
    const GradientJudgement right = judge_backward(p, d_out, kBf16Unit);
    double error = 0, size = 0;
    for (size_t h = 0; h < right.d_bias.size(); ++h) {
      error += std::pow(with.d_bias[h] - right.d_bias[h], 2);
      size += std::pow(right.d_bias[h], 2);
    }
    EXPECT_LE(std::sqrt(error), 1e-2 * std::sqrt(size));
  }
}

// More key tiles than a GPU has multiprocessors for: a block works on one after the other.
TEST_P(GpuAttentionGradient, ManyHeads) {
  for (int64_t d : {64, 128}) {
    AttentionProblem p = shape(100, 1, d, 0, 200);
    add_band_of_history(p, {1, 0, 150});
    add_band_of_history(p, {16, 150, kUnlimited});
    p.landmark_bias = normal_floats(p.heads, 5);
    expect_kernel(p, static_cast<unsigned>(d + 3));
    if (HasFailure()) return;
  }
}

// The same with tiles that have all their queries, before, between and behind others that do not; some blocks
// work on tiles of both kinds.
TEST_P(GpuAttentionGradient, TilesWithAndWithoutAllTheirQueries) {
  AttentionProblem p = shape(24, 1, 64, 1000, 900);
  add_band_of_history(p, {1, 0, 130});
  add_band_of_history(p, {2, 130, 450});
  add_band_of_history(p, {16, 450, kUnlimited});
  expect_kernel(p, 77);
}

// Landmarks whose queries are cut into several blocks: sums of parts in a fixed order, whichever way the
// parts were dealt out.
TEST_P(GpuAttentionGradient, SeveralBlocksOfTheQueriesOfLandmarks) {
  AttentionProblem p = shape(1, 1, 64, 0, 4200);
  add_band_of_history(p, {1, 0, 64});
  add_band_of_history(p, {32, 64, kUnlimited});
  p.landmark_bias = {0.5F};
  expect_kernel(p, 91);
}

TEST_P(GpuAttentionGradient, NoQueriesAndNoKeysAddNothing) {
  AttentionProblem p = shape(2, 2, 64, 5, 40);
  add_band(p, {1, 0, 10}, 0, 0);
  expect_kernel(p, 3);
  AttentionProblem none = shape(2, 2, 64, 5, 0);
  add_band(none, {1, 0, 10}, 0, 40);
  fill(none, 4);
  GpuGradient there(none, {}, stream());
  there.run(GetParam());
  const GradientJudgement answer = there.answer();
  for (double x : answer.dk[0])
    EXPECT_EQ(x, 0);
}

TEST_P(GpuAttentionGradient, RefusesProblemsThatNoCallerMayPose) {
  AttentionProblem p = shape(1, 1, 64, 0, 8);
  add_band_of_history(p, {1, 0, 4});
  fill(p, 1);
  GpuAttention there(p, stream());
  AttentionGradient<BFloat16> a;
  a.forward = there.description();
  a.d_out = a.dq = a.forward.out;
  EXPECT_THROW(attention_backward_workspace(a), InvariantError);  // no dk, no dv
  std::vector<float> unused(1);
  const std::vector<BandGradient<BFloat16>> d_bands{{unused.data(), unused.data(), 0}};
  a.d_bands = d_bands;
  EXPECT_GT(attention_backward_workspace(a), 0);
  EXPECT_THROW(attention_backward(stream(), a, GetParam()), InvariantError);  // no workspace
  a.workspace = unused.data();
  EXPECT_THROW(attention_backward(stream(), a, AttentionKernel::kDecode), InvariantError);
  a.forward.lse = nullptr;
  EXPECT_THROW(attention_backward(stream(), a, GetParam()), InvariantError);
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuAttentionGradient,
                         ::testing::Values(AttentionKernel::kHopper, AttentionKernel::kPortable),
                         kernel_name);

}  // namespace
}  // namespace longhalo::testing

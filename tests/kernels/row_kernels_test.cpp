// RMSNorm, SwiGLU and the passes over logits against their definitions, with every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "kernels/logits/logits.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/swiglu/swiglu.hpp"
#include "numbers.hpp"
#include "with_isa.hpp"

namespace longhalo::testing {
namespace {

class RowKernels : public WithIsa {};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST_P(RowKernels, Rmsnorm) {
  for (int64_t hidden : {1, 2, 7, 16, 63, 64, 65, 576, 1021}) {
    const int64_t n = 5;
    const auto x = normal(n * hidden, 1, 3), weight = normal(hidden, 2);
    std::vector<double> right(x.size());
    rmsnorm_reference(n, hidden, upcast(x).data(), upcast(weight).data(), 1e-5, right.data());
    std::vector<float> out(x.size(), kNan);
    rmsnorm(n, hidden, x.data(), weight.data(), 1e-5F, out.data());
    // A sum of `hidden` squares (all positive: at most hidden u, here at most hidden / lanes + lanes in a
    // chain), then its division, epsilon, root (which halves what came before), reciprocal and two products.
    const double tolerance = kUnit * (static_cast<double>(hidden) / 2 + 6);
    expect_close(out, right, right, tolerance);
    std::vector<float> in_place = x;
    rmsnorm(n, hidden, in_place.data(), weight.data(), 1e-5F, in_place.data());
    EXPECT_EQ(in_place, out);
  }
}

TEST_P(RowKernels, Swiglu) {
  for (int64_t ffn : {1, 3, 15, 16, 17, 64, 1531}) {
    const int64_t n = 4;
    auto gate_up = normal(n * 2 * ffn, 3, 6);
    gate_up[0] = -80, gate_up[static_cast<size_t>(2 * ffn)] = 90;
    std::vector<double> right(static_cast<size_t>(n * ffn));
    swiglu_reference(n, ffn, upcast(gate_up).data(), right.data());
    std::vector<float> out(right.size(), kNan);
    swiglu(n, ffn, gate_up.data(), out.data());
    expect_close(out, right, right,
                 kUnit * (4 + 4));  // exp: 2 ulp = 4 u; sum, quotient, product: 3 u, to first order
  }
}

TEST_P(RowKernels, SwigluFarOutIsTheLimit) {
  const std::vector<float> gate_up{-1000, -90, 1000, 90, 2, 2, 2, 2};
  std::vector<float> out(4, kNan);
  swiglu(1, 4, gate_up.data(), out.data());
  EXPECT_NEAR(out[0], 0, 1e-30);
  EXPECT_NEAR(out[1], 0, 1e-30);
  EXPECT_EQ(out[2], 2000);
  EXPECT_EQ(out[3], 180);
}

TEST_P(RowKernels, LogSumExp) {
  for (int64_t vocabulary : {1, 2, 15, 255, 256, 257, 4099, 49152}) {
    const int64_t n = 3;
    auto logits = normal(n * vocabulary, 5, 8);
    for (int64_t c = 0; c < vocabulary; ++c)
      logits[static_cast<size_t>(c)] += 1000;
    std::vector<double> out(n, kNan);
    log_sum_exp(n, vocabulary, logits.data(), out.data());
    for (int64_t i = 0; i < n; ++i) {
      const float* row = logits.data() + i * vocabulary;
      const double top = *std::max_element(row, row + vocabulary);
      double sum = 0;
      for (int64_t c = 0; c < vocabulary; ++c)
        sum += std::exp(row[c] - top);
      // Each term errs by 2 ulp and its argument's rounding (below 128 * u where the term counts), chains of
      // 16 in fp32; the logarithm turns that relative error into an absolute one.
      EXPECT_NEAR(out[static_cast<size_t>(i)], top + std::log(sum), kUnit * (4 + 128 + 16)) << vocabulary;
    }
  }
}

TEST_P(RowKernels, LogSumExpOfInfinities) {
  const std::vector<float> logits{-kInfinity, -kInfinity, 1, kInfinity, -kInfinity, 2};
  double out[3];
  log_sum_exp(3, 2, logits.data(), out);
  EXPECT_EQ(out[0], -kInfinity);
  EXPECT_EQ(out[1], kInfinity);
  EXPECT_DOUBLE_EQ(out[2], 2);
}

TEST_P(RowKernels, ArgmaxTakesTheFirstOfEqualsAndRefusesNan) {
  for (int64_t vocabulary : {1, 5, 16, 33, 1000}) {
    for (int64_t at : {int64_t{0}, vocabulary / 2, vocabulary - 1}) {
      std::vector<float> logits(static_cast<size_t>(vocabulary), -2);
      for (int64_t c = at; c < vocabulary; c += 3)
        logits[static_cast<size_t>(c)] = -1;
      EXPECT_EQ(argmax(vocabulary, logits.data()), at);
      logits[static_cast<size_t>(vocabulary - 1 - at)] = kNan;
      EXPECT_THROW(argmax(vocabulary, logits.data()), InvariantError);
    }
  }
  const std::vector<float> nothing(7, -kInfinity);
  EXPECT_EQ(argmax(7, nothing.data()), 0);
}

TEST_P(RowKernels, SamplingFollowsTheNucleus) {
  // Probabilities 1/2, 1/4, 1/8, 1/8 at ids 2, 0, 3, 1 (ids 1 and 3 are equal: the lower id comes first).
  const std::vector<float> logits{std::log(2.0F), 0, std::log(4.0F), 0};
  EXPECT_EQ(sample_top_p(4, logits.data(), 1, 1, 0.0), 2);
  EXPECT_EQ(sample_top_p(4, logits.data(), 1, 1, 0.49), 2);
  EXPECT_EQ(sample_top_p(4, logits.data(), 1, 1, 0.51), 0);
  EXPECT_EQ(sample_top_p(4, logits.data(), 1, 1, 0.76), 1);
  EXPECT_EQ(sample_top_p(4, logits.data(), 1, 1, 0.99), 3);
  // A nucleus of 0.7 is {2, 0}, renormalised to 2/3 and 1/3; one of 0.3 is {2}.
  EXPECT_EQ(sample_top_p(4, logits.data(), 1, 0.7, 0.66), 2);
  EXPECT_EQ(sample_top_p(4, logits.data(), 1, 0.7, 0.67), 0);
  EXPECT_EQ(sample_top_p(4, logits.data(), 1, 0.7, 0.999), 0);
  EXPECT_EQ(sample_top_p(4, logits.data(), 1, 0.3, 0.999), 2);
  // Half the temperature squares the odds: 16 : 4 : 1 : 1.
  EXPECT_EQ(sample_top_p(4, logits.data(), 0.5, 1, 16.0 / 22 - 0.01), 2);
  EXPECT_EQ(sample_top_p(4, logits.data(), 0.5, 1, 16.0 / 22 + 0.01), 0);
}

TEST_P(RowKernels, SamplingOfAWideNucleusIsTheInverseOfTheDistribution) {
  const int64_t vocabulary = 5000;  // equal logits: the nucleus is wider than what is ordered at first
  const std::vector<float> logits(static_cast<size_t>(vocabulary), 0.25F);
  for (int64_t id : {0, 1, 63, 64, 65, 511, 512, 4000, 4499})
    EXPECT_EQ(sample_top_p(vocabulary, logits.data(), 0.7, 0.9, (static_cast<double>(id) + 0.5) / 4500), id);
}

TEST_P(RowKernels, SameBitsForAnyNumberOfThreads) {
  const int64_t n = 37, size = 130;
  const auto x = normal(n * 2 * size, 1), weight = normal(size, 2);
  std::vector<float> first_norm, first_gated;
  std::vector<double> first_sums;
  with_threads([&](int threads) {
    std::vector<float> normed(static_cast<size_t>(n * size)), gated(normed.size());
    std::vector<double> sums(static_cast<size_t>(n));
    rmsnorm(n, size, x.data(), weight.data(), 1e-6F, normed.data());
    swiglu(n, size, x.data(), gated.data());
    log_sum_exp(n, size, x.data(), sums.data());
    if (threads == 1) first_norm = normed, first_gated = gated, first_sums = sums;
    EXPECT_EQ(normed, first_norm);
    EXPECT_EQ(gated, first_gated);
    EXPECT_EQ(sums, first_sums);
  });
}

INSTANTIATE_TEST_SUITE_P(Cpu, RowKernels, all_isas(), isa_test_name);

}  // namespace
}  // namespace longhalo::testing

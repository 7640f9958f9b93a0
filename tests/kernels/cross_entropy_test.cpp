// Cross-entropy and its gradient: fp64 against central differences, fp32 against fp64.
#include "kernels/cross_entropy/cross_entropy.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "differences.hpp"
#include "numbers.hpp"
#include "with_isa.hpp"

namespace longhalo::testing {
namespace {

std::vector<int32_t> some_labels(int64_t n, int64_t vocabulary, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> labels(static_cast<size_t>(n));
  for (int32_t& label : labels)
    label = random() % 4 == 0 ? kIgnoredLabel
                              : static_cast<int32_t>(random() % static_cast<unsigned>(vocabulary));
  labels.back() = static_cast<int32_t>(vocabulary - 1);
  return labels;
}

TEST(CrossEntropyReference, IsTheSlope) {
  const int64_t n = 6, hidden = 4, vocabulary = 9;
  auto x = upcast(normal(n * hidden, 1)), head = upcast(normal(vocabulary * hidden, 2));
  const auto labels = some_labels(n, vocabulary, 3);
  for (double z_loss : {0.0, 0.1}) {
    std::vector<double> d_x(x.size()), d_head(head.size());
    CrossEntropy<double> p{n,      hidden, vocabulary, x.data(),     head.data(), labels.data(),
                           z_loss, 0.3,    d_x.data(), d_head.data()};
    const CrossEntropySums sums = cross_entropy_reference(p);
    EXPECT_EQ(sums.count, n - std::count(labels.begin(), labels.end(), kIgnoredLabel));
    EXPECT_LT(sums.count, n);
    p.d_x = p.d_head = nullptr;
    const auto loss = [&] {
      const CrossEntropySums at = cross_entropy_reference(p);
      return p.scale * (at.loss + at.z_loss);
    };
    expect_slope(loss, x, d_x, "d_x");
    expect_slope(loss, head, d_head, "d_head");
  }
}

// Worked by hand: two words with logits 0 and ln 3 have probabilities 1/4 and 3/4.
TEST(CrossEntropyReference, WorkedValues) {
  const std::vector<double> x{1}, head{0, std::log(3.0)};
  const std::vector<int32_t> labels{1};
  std::vector<double> d_x(1), d_head(2);
  const CrossEntropySums sums = cross_entropy_reference(
      {1, 1, 2, x.data(), head.data(), labels.data(), 0.5, 2, d_x.data(), d_head.data()});
  const double lse = std::log(4.0);
  EXPECT_NEAR(sums.loss, std::log(4.0 / 3), 1e-15);
  EXPECT_NEAR(sums.z_loss, 0.5 * lse * lse, 1e-15);
  EXPECT_EQ(sums.count, 1);
  EXPECT_NEAR(d_head[0], 2 * 0.25 * (1 + lse), 1e-15);
  EXPECT_NEAR(d_head[1], 2 * (0.75 * (1 + lse) - 1), 1e-15);
  EXPECT_NEAR(d_x[0], d_head[1] * head[1], 1e-15);
}

struct Sizes {
  double longest_x = 0, longest_head = 0;
  std::vector<double> column;  // [V] sum over rows that count of (p + [label]) |x|
  double largest_lse = 0, lse_sum = 0;
};

double length(const float* x, int64_t d) {
  double squares = 0;
  for (int64_t c = 0; c < d; ++c)
    squares += std::pow(x[c], 2);
  return std::sqrt(squares);
}

Sizes sizes_of(const CrossEntropy<float>& p) {
  Sizes sizes;
  sizes.column.resize(static_cast<size_t>(p.vocabulary));
  for (int64_t t = 0; t < p.vocabulary; ++t)
    sizes.longest_head = std::max(sizes.longest_head, length(p.head + t * p.hidden, p.hidden));
  std::vector<double> weight(sizes.column.size());
  for (int64_t i = 0; i < p.n; ++i) {
    if (p.labels[i] == kIgnoredLabel) continue;
    const double x = length(p.x + i * p.hidden, p.hidden);
    sizes.longest_x = std::max(sizes.longest_x, x);
    double sum = 0;
    for (int64_t t = 0; t < p.vocabulary; ++t) {
      double logit = 0;
      for (int64_t c = 0; c < p.hidden; ++c)
        logit += static_cast<double>(p.x[i * p.hidden + c]) * p.head[t * p.hidden + c];
      sum += weight[static_cast<size_t>(t)] = std::exp(logit);
    }
    for (size_t t = 0; t < weight.size(); ++t)
      sizes.column[t] += weight[t] / sum * x;
    sizes.column[static_cast<size_t>(p.labels[i])] += x;
    sizes.largest_lse = std::max(sizes.largest_lse, std::abs(std::log(sum)));
  }
  return sizes;
}

// To first order, with u = 2^-24, lambda = 4 (attention_problem.cpp says why), A = max|x| max|head|, Z = 2
// z_loss:
//   a logit errs by l = lambda sqrt(D) u A, and lse by as much and 20 u (its terms' exponentials and short
//   sums); a probability, relative: 2 l, the rounding of l - top (2 A u), 20 u, the exponential and products:
//   8 u =: e; the gradient of a logit, at most scale p (1 + Z |lse|) + scale [label], by that times e, scale
//   p Z (l + 20 u) more for lse, and 3 u for the last roundings.
// d_x and d_head are sums of these times rows of head or x, over V or n terms: lambda sqrt(terms) u more.
void expect_right(int64_t n, int64_t hidden, int64_t vocabulary, float z_loss) {
  const auto x = normal(n * hidden, 1), head = normal(vocabulary * hidden, 2, 0.3F);
  const auto labels = some_labels(n, vocabulary, 3);
  const auto x64 = upcast(x), head64 = upcast(head);
  const float scale = 1.0F / 64;
  std::vector<double> d_x_right(x.size(), 0.25), d_head_right(head.size(), 0.25);
  const CrossEntropySums right =
      cross_entropy_reference({n, hidden, vocabulary, x64.data(), head64.data(), labels.data(), z_loss, scale,
                               d_x_right.data(), d_head_right.data()});
  const Isa before = current_isa();
  for (Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (!isa_available(isa)) continue;
    SCOPED_TRACE(::testing::Message()
                 << isa_name(isa) << " n " << n << " D " << hidden << " V " << vocabulary);
    use_isa(isa);
    std::vector<float> d_x(x.size(), 0.25F), d_head(head.size(), 0.25F);  // added into
    const CrossEntropy<float> p{n,      hidden, vocabulary, x.data(),     head.data(), labels.data(),
                                z_loss, scale,  d_x.data(), d_head.data()};
    const CrossEntropySums got = cross_entropy(p);
    const Sizes sizes = sizes_of(p);
    const double logit =
        4 * std::sqrt(static_cast<double>(hidden)) * kUnit * sizes.longest_x * sizes.longest_head;
    const double lse = logit + 20 * kUnit, z = 2 * static_cast<double>(z_loss);
    const double share = 1 + z * sizes.largest_lse;
    const double e =
        share * (2 * logit + (2 * sizes.longest_x * sizes.longest_head + 28) * kUnit) + z * lse + 3 * kUnit;
    const auto rows = static_cast<double>(n), words = static_cast<double>(vocabulary);
    EXPECT_EQ(got.count, right.count);
    EXPECT_NEAR(got.loss, right.loss, static_cast<double>(got.count) * (logit + lse));
    EXPECT_NEAR(got.z_loss, right.z_loss, static_cast<double>(got.count) * z * sizes.largest_lse * lse);
    const double over_words = scale * sizes.longest_head * (1 + share) * (e + 4 * std::sqrt(words) * kUnit);
    for (int64_t i = 0; i < n; ++i) {
      double squares = 0;
      for (int64_t c = 0; c < hidden; ++c)
        squares += std::pow(
            d_x[static_cast<size_t>(i * hidden + c)] - d_x_right[static_cast<size_t>(i * hidden + c)], 2);
      ASSERT_LE(std::sqrt(squares), over_words + 0.25 * std::sqrt(static_cast<double>(hidden)) * kUnit) << i;
    }
    for (int64_t t = 0; t < vocabulary; ++t) {
      double squares = 0;
      for (int64_t c = 0; c < hidden; ++c)
        squares += std::pow(
            d_head[static_cast<size_t>(t * hidden + c)] - d_head_right[static_cast<size_t>(t * hidden + c)],
            2);
      // What is added to, 0.25, is rounded with every tile that adds.
      ASSERT_LE(std::sqrt(squares),
                scale * share * sizes.column[static_cast<size_t>(t)] * (e + 4 * std::sqrt(rows) * kUnit) +
                    2 * 0.25 * std::sqrt(static_cast<double>(hidden)) * kUnit)
          << t;
    }
    const CrossEntropySums alone =
        cross_entropy({n, hidden, vocabulary, x.data(), head.data(), labels.data(), z_loss});
    EXPECT_EQ(alone.loss, got.loss);  // without gradients, the same
    EXPECT_EQ(alone.count, got.count);
  }
  use_isa(before);
}

TEST(CrossEntropy, AgreesWithTheReference) {
  for (float z_loss : {0.0F, 1e-3F}) {
    expect_right(1, 8, 5, z_loss);
    expect_right(37, 64, 1003, z_loss);
    expect_right(150, 33, 257, z_loss);
  }
}

TEST(CrossEntropy, MoreThanOneTileOfRows) {
  expect_right(70, 4, 300'000, 0);  // tiles of 64 rows
}

TEST(CrossEntropy, IgnoredRowsAddNothing) {
  const std::vector<float> x(6, 1), head(10, 1);
  const std::vector<int32_t> labels(3, kIgnoredLabel);
  std::vector<float> d_x(6, 7), d_head(10, 7);
  for (int64_t n : {0, 3}) {
    const CrossEntropySums sums = cross_entropy(
        {n, 2, 5, x.data(), head.data(), n > 0 ? labels.data() : nullptr, 0, 1, d_x.data(), d_head.data()});
    EXPECT_EQ(sums.count, 0);
    EXPECT_EQ(sums.loss, 0);
  }
  EXPECT_EQ(d_x, std::vector<float>(6, 7));
  EXPECT_EQ(d_head, std::vector<float>(10, 7));
}

TEST(CrossEntropy, WhatIsNotFiniteIsNotHiddenAndLabelsAreChecked) {
  std::vector<float> x{1, 2, 3, 4};
  const std::vector<float> head(6, 1);
  std::vector<int32_t> labels{0, 2};
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    x[2] = bad;
    EXPECT_FALSE(std::isfinite(cross_entropy({2, 2, 3, x.data(), head.data(), labels.data()}).loss));
  }
  for (int32_t label : {3, -1, -101}) {
    labels[1] = label;
    EXPECT_THROW(cross_entropy({2, 2, 3, x.data(), head.data(), labels.data()}), InvariantError);
  }
}

}  // namespace
}  // namespace longhalo::testing

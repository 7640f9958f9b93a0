// Weights rounded for their inputs, against coordinate descent in fp64, and what it needs to know of the
// inputs.
#include "kernels/quantize/quantize_for_inputs.hpp"

#include <algorithm>
#include <memory>
#include <set>

#include "device/memory_pool.hpp"
#include "e4m3.hpp"
#include "gpu_test.hpp"
#include "guarded.hpp"
#include "kernels/quantize/quantize.hpp"

namespace longhalo::testing {
namespace {

constexpr int64_t kPoolRounding = 4096;  // three arrays, each to 512 bytes

class QuantizeForInputs : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) matmul_ = std::make_unique<DeviceMatmul>(stream());
  }
  std::unique_ptr<DeviceMatmul> matmul_;
};

// Rows that have much in common, most of whose variance is in few directions.
std::vector<BFloat16> correlated(int64_t n, int64_t width, unsigned seed) {
  constexpr int64_t kDirections = 8;
  const std::vector<float> directions = normal_floats(kDirections * width, seed),
                           strengths = normal_floats(n * kDirections, seed + 1),
                           own = normal_floats(n * width, seed + 2, 0.5F),
                           common = normal_floats(width, seed + 3, 3);
  std::vector<BFloat16> x;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < width; ++c) {
      float sum = own[static_cast<size_t>(i * width + c)] + common[static_cast<size_t>(c)];
      for (int64_t d = 0; d < kDirections; ++d)
        sum += strengths[static_cast<size_t>(i * kDirections + d)] *
               directions[static_cast<size_t>(d * width + c)];
      x.push_back(to_bfloat16(sum));
    }
  }
  return x;
}

TEST_F(QuantizeForInputs, MeanAndCovarianceAreThoseOfTheRows) {
  struct Shape {
    int64_t n, width;
  };
  for (const Shape& s : {Shape{1, 16}, Shape{5, 64}, Shape{700, 96}, Shape{1000, 272}}) {
    SCOPED_TRACE(::testing::Message() << "n " << s.n << ", width " << s.width);
    const auto x = correlated(s.n, s.width, 1);
    Guarded<BFloat16> in(s.n * s.width, stream()), mean(s.width, stream()),
        covariance(s.width * s.width, stream());
    in.put(x);
    mean_and_covariance(*matmul_, stream(), s.n, s.width, in.data(), mean.data(), covariance.data());
    const std::vector<double> rows = doubles(x), got_mean = doubles(mean.values()),
                              got = doubles(covariance.values());
    const auto count = static_cast<double>(s.n);
    const auto at = [&](int64_t i, int64_t c) { return rows[static_cast<size_t>(i * s.width + c)]; };
    std::vector<double> right(got.size());
    double variance = 0;
    for (int64_t a = 0; a < s.width; ++a) {
      double sum = 0;
      for (int64_t i = 0; i < s.n; ++i)
        sum += at(i, a);
      EXPECT_NEAR(got_mean[static_cast<size_t>(a)], sum / count, kBf16Unit * std::abs(sum / count));
      for (int64_t b = 0; b < s.width; ++b) {
        double products = 0;  // about the mean as it was rounded
        for (int64_t i = 0; i < s.n; ++i)
          products +=
              (at(i, a) - got_mean[static_cast<size_t>(a)]) * (at(i, b) - got_mean[static_cast<size_t>(b)]);
        right[static_cast<size_t>(a * s.width + b)] = products / count;
      }
      variance += right[static_cast<size_t>(a * s.width + a)] / static_cast<double>(s.width);
    }
    for (int64_t a = 0; a < s.width; ++a) {
      for (int64_t b = 0; b < s.width; ++b) {
        double sizes = 0, squares = 0;  // of what is added in fp32, as in device_matmul_test
        for (int64_t i = 0; i < s.n; ++i) {
          const double product =
              (at(i, a) - got_mean[static_cast<size_t>(a)]) * (at(i, b) - got_mean[static_cast<size_t>(b)]);
          sizes += std::abs(product);
          squares += product * product;
        }
        const double expected = right[static_cast<size_t>(a * s.width + b)] + (a == b ? variance : 0);
        const double sum_error = 8 * 0x1p-23 * std::sqrt(squares / count);
        // Rounded to bf16: what is multiplied, twice by half a unit, and the result by one.
        ASSERT_NEAR(got[static_cast<size_t>(a * s.width + b)], expected,
                    kBf16Unit * (std::abs(expected) + sizes / count + (a == b ? variance : 0)) +
                        2 * sum_error + 0x1p-23 * variance)
            << a << ", " << b;
      }
    }
  }
}

// Sums of so many products, 64^2 each, have 2^25, where fp32's numbers are 4 apart; how a column varies adds
// 1 to each.
TEST_F(QuantizeForInputs, WhatColumnsHaveInCommonDoesNotHideHowTheyVary) {
  constexpr int64_t kRows = 8192, kWidth = 64;
  std::vector<BFloat16> x;
  for (const float varies : normal_floats(kRows * kWidth, 3))
    x.push_back(to_bfloat16(64 + varies));
  Guarded<BFloat16> in(kRows * kWidth, stream()), mean(kWidth, stream()),
      covariance(kWidth * kWidth, stream());
  in.put(x);
  mean_and_covariance(*matmul_, stream(), kRows, kWidth, in.data(), mean.data(), covariance.data());
  // Independent columns of variance 1 (rounded to halves and quarters: 1/64 at most more): five standard
  // errors, and what bf16 rounds.
  const double sampled = 5 * std::sqrt(2.0 / kRows);
  const std::vector<double> got = doubles(covariance.values());
  for (int64_t a = 0; a < kWidth; ++a)
    for (int64_t b = 0; b < kWidth; ++b)
      ASSERT_NEAR(got[static_cast<size_t>(a * kWidth + b)], a == b ? 2 : 0,
                  a == b ? 2 * (sampled + 1.0 / 64) + 3 * kBf16Unit : sampled)
          << a << ", " << b;
}

struct Weights {
  std::vector<double> values, scales;  // as rounded; of each row
  // Mean square of the error of a product: of D C D^T.
  double error(const std::vector<double>& w, const std::vector<double>& covariance) const {
    const size_t width = w.size() / scales.size();
    double sum = 0;
    for (size_t row = 0; row < scales.size(); ++row)
      for (size_t a = 0; a < width; ++a)
        for (size_t b = 0; b < width; ++b)
          sum += (values[row * width + a] - w[row * width + a]) * covariance[a * width + b] *
                 (values[row * width + b] - w[row * width + b]);
    return sum;
  }
};

Weights on_host(Guarded<Fp8E4M3>& codes, Guarded<float>& scales) {
  Weights made;
  for (const float scale : scales.values())
    made.scales.push_back(scale);
  const std::vector<Fp8E4M3> all = codes.values();
  for (size_t at = 0; at < all.size(); ++at)
    made.values.push_back(e4m3_value(all[at].bits) * made.scales[at / (all.size() / made.scales.size())]);
  return made;
}

// Three passes from `from`.
Weights descended(Weights from, const std::vector<double>& w, const std::vector<double>& covariance) {
  const size_t width = w.size() / from.scales.size();
  for (size_t row = 0; row < from.scales.size(); ++row) {
    double* const values = from.values.data() + row * width;
    for (int pass = 0; pass < 3; ++pass) {
      for (size_t c = 0; c < width; ++c) {
        double slope = 0;
        for (size_t b = 0; b < width; ++b)
          slope += (values[b] - w[row * width + b]) * covariance[c * width + b];
        const double wanted = values[c] - slope / covariance[c * width + c];
        values[c] = e4m3_value(e4m3_code(static_cast<float>(wanted / from.scales[row]))) * from.scales[row];
      }
    }
  }
  return from;
}

TEST_F(QuantizeForInputs, ProductsErrAsLittleAsDescentInDoubleMakesThem) {
  struct Shape {
    int64_t n, width;
  };
  for (const Shape& s : {Shape{16, 16}, Shape{48, 64}, Shape{80, 112}, Shape{112, 272}}) {
    SCOPED_TRACE(::testing::Message() << "n " << s.n << ", width " << s.width);
    const auto x = correlated(400, s.width, 5), w = normal_bf16(s.n * s.width, 9, 0.05F);
    Guarded<BFloat16> in(400 * s.width, stream()), mean(s.width, stream()),
        covariance(s.width * s.width, stream()), weights(s.n * s.width, stream());
    Guarded<Fp8E4M3> codes(s.n * s.width, stream());
    Guarded<float> scales(s.n, stream());
    in.put(x), weights.put(w);
    mean_and_covariance(*matmul_, stream(), 400, s.width, in.data(), mean.data(), covariance.data());
    quantize_rows_least_error(stream(), s.n, s.width, weights.data(), {codes.data(), scales.data()});
    const Weights least = on_host(codes, scales);
    codes.poison(), scales.poison();
    quantize_rows_for_inputs(*matmul_, stream(), s.n, s.width, weights.data(), covariance.data(),
                             {codes.data(), scales.data()});
    const Weights got = on_host(codes, scales);
    EXPECT_EQ(got.scales, least.scales);
    codes.poison(), scales.poison();
    const int64_t others = memory_pool().use().used_bytes;
    memory_pool().reset_high_marks();
    quantize_rows_for_inputs(*matmul_, stream(), s.n, s.width, weights.data(), covariance.data(),
                             {codes.data(), scales.data()});
    EXPECT_LE(memory_pool().use().used_high_bytes - others, 6 * s.n * s.width + 128 * s.n + kPoolRounding);
    EXPECT_EQ(on_host(codes, scales).values, got.values);
    const std::vector<double> exact = doubles(w), inputs = doubles(covariance.values());
    const double reached = got.error(exact, inputs), before = least.error(exact, inputs),
                 right = descended(least, exact, inputs).error(exact, inputs);
    EXPECT_LT(right, 0.8 * before);
    // A choice between numbers equally good, to the slopes' roundings, may lead to another minimum.
    EXPECT_NEAR(reached / right, 1, 0.05);
  }
}

TEST_F(QuantizeForInputs, OutliersAreTheColumnsOfMostErrorAndAreThereTwice) {
  constexpr int64_t kRows = 48, kWidth = 112, kOutliers = 16;
  auto x = correlated(400, kWidth, 5);
  auto w = normal_bf16(kRows * kWidth, 9, 0.05F);
  const auto stronger = [](std::vector<BFloat16>& of, int64_t column, float factor) {
    for (size_t at = static_cast<size_t>(column); at < of.size(); at += kWidth)
      of[at] = to_bfloat16(factor * to_float(of[at]));
  };
  stronger(x, 70, 8), stronger(w, 3, 8), stronger(x, 41, 8), stronger(w, 41, 0.01F);
  Guarded<BFloat16> in(400 * kWidth, stream()), mean(kWidth, stream()), covariance(kWidth * kWidth, stream()),
      weights(kRows * kWidth, stream());
  in.put(x), weights.put(w);
  mean_and_covariance(*matmul_, stream(), 400, kWidth, in.data(), mean.data(), covariance.data());
  const std::vector<int32_t> columns =
      find_outliers(stream(), kRows, kWidth, weights.data(), covariance.data(), kOutliers);

  // By their definition: the variance of a column's inputs times the square of its weights. The covariance's
  // diagonal is this variance and the mean of all, rounded to bf16.
  std::vector<double> variance(kWidth), square(kWidth);
  const std::vector<double> rows = doubles(x), exact = doubles(w), middle = doubles(mean.values());
  double mean_variance = 0;
  for (size_t c = 0; c < kWidth; ++c) {
    for (size_t at = c; at < rows.size(); at += kWidth)
      variance[c] += std::pow(rows[at] - middle[c], 2) / 400;
    for (size_t at = c; at < exact.size(); at += kWidth)
      square[c] += exact[at] * exact[at];
    mean_variance += variance[c] / kWidth;
  }
  ASSERT_EQ(columns.size(), kOutliers);
  EXPECT_TRUE(std::is_sorted(columns.begin(), columns.end()));
  const std::set<int32_t> chosen(columns.begin(), columns.end());
  EXPECT_EQ(chosen.size(), kOutliers);
  EXPECT_TRUE(chosen.contains(70) && chosen.contains(3) && !chosen.contains(41));
  double least = std::numeric_limits<double>::infinity(), most = 0;
  for (size_t c = 0; c < kWidth; ++c) {
    const double unsure = 1.01 * kBf16Unit * (variance[c] + 2 * mean_variance);
    if (chosen.contains(static_cast<int32_t>(c)))
      least = std::min(least, square[c] * (variance[c] + unsure));
    else
      most = std::max(most, square[c] * (variance[c] - unsure));
  }
  EXPECT_GE(least, most);

  constexpr int64_t kStored = kWidth + kOutliers;
  Guarded<Fp8E4M3> once(kRows * kWidth, stream()), twice(kRows * kStored, stream());
  Guarded<float> scales(kRows, stream()), same_scales(kRows, stream());
  Guarded<int32_t> outliers(kOutliers, stream());
  outliers.put(columns);
  quantize_rows_for_inputs(*matmul_, stream(), kRows, kWidth, weights.data(), covariance.data(),
                           {once.data(), scales.data()});
  quantize_rows_for_inputs(
      *matmul_, stream(), kRows, kWidth, weights.data(), covariance.data(),
      {.values = twice.data(), .scales = same_scales.data(), .outliers = {outliers.data(), kOutliers}});
  EXPECT_TRUE(find_outliers(stream(), kRows, kWidth, weights.data(), covariance.data(), 0).empty());
  expect_same_bits(same_scales.values(), scales.values());
  const std::vector<Fp8E4M3> codes = once.values(), all = twice.values();
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t c = 0; c < kStored; ++c)
      ASSERT_EQ(all[static_cast<size_t>(row * kStored + c)].bits,
                codes[static_cast<size_t>(row * kWidth +
                                          (c < kWidth ? c : columns[static_cast<size_t>(c - kWidth)]))]
                    .bits)
          << "row " << row << ", column " << c;
}

TEST_F(QuantizeForInputs, WhereNothingIsKnownOfInputsTheNearestStays) {
  constexpr int64_t kRows = 32, kWidth = 80;
  const auto w = normal_bf16(kRows * kWidth, 9, 0.05F);
  Guarded<BFloat16> covariance(kWidth * kWidth, stream()), weights(kRows * kWidth, stream());
  Guarded<Fp8E4M3> codes(kRows * kWidth, stream());
  Guarded<float> scales(kRows, stream());
  weights.put(w);
  quantize_rows_least_error(stream(), kRows, kWidth, weights.data(), {codes.data(), scales.data()});
  const Weights least = on_host(codes, scales);
  for (const float value : {0.0F, std::numeric_limits<float>::quiet_NaN()}) {
    covariance.put(std::vector<BFloat16>(static_cast<size_t>(kWidth * kWidth), to_bfloat16(value)));
    codes.poison(), scales.poison();
    quantize_rows_for_inputs(*matmul_, stream(), kRows, kWidth, weights.data(), covariance.data(),
                             {codes.data(), scales.data()});
    EXPECT_EQ(on_host(codes, scales).values, least.values) << value;
  }
}

}  // namespace
}  // namespace longhalo::testing

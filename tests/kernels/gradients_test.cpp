// The gradients of RMSNorm, SwiGLU, the embedding and matrix products: fp64 against central differences, fp32
// against fp64 with every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "differences.hpp"
#include "kernels/embedding/embedding.hpp"
#include "kernels/matmul/matmul.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/swiglu/swiglu.hpp"
#include "numbers.hpp"
#include "with_isa.hpp"

namespace longhalo::testing {
namespace {

class Gradients : public WithIsa {};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(GradientReferences, RmsnormIsTheSlope) {
  const int64_t n = 3, hidden = 7;
  auto x = upcast(normal(n * hidden, 1)), weight = upcast(normal(hidden, 2));
  const auto d_out = upcast(normal(n * hidden, 3));
  std::vector<double> dx(x.size()), d_weight(weight.size()), out(x.size());
  rmsnorm_backward_reference(n, hidden, x.data(), weight.data(), 0.1, d_out.data(), dx.data(),
                             d_weight.data());
  const auto loss = [&] {
    rmsnorm_reference(n, hidden, x.data(), weight.data(), 0.1, out.data());
    return inner_product(out, d_out);
  };
  expect_slope(loss, x, dx, "dx");
  expect_slope(loss, weight, d_weight, "d_weight");
}

TEST(GradientReferences, SwigluIsTheSlope) {
  const int64_t n = 3, ffn = 5;
  auto gate_up = upcast(normal(n * 2 * ffn, 1, 2));
  const auto d_out = upcast(normal(n * ffn, 3));
  std::vector<double> gradient(gate_up.size()), out(d_out.size());
  swiglu_backward_reference(n, ffn, gate_up.data(), d_out.data(), gradient.data());
  const auto loss = [&] {
    swiglu_reference(n, ffn, gate_up.data(), out.data());
    return inner_product(out, d_out);
  };
  expect_slope(loss, gate_up, gradient, "d_gate_up");
}

// Magnitudes that the errors of RMSNorm's gradient are relative to.
struct NormSizes {
  std::vector<double> dx, d_weight;
};
NormSizes norm_sizes(int64_t n, int64_t hidden, const std::vector<float>& x, const std::vector<float>& weight,
                     double epsilon, const std::vector<float>& d_out) {
  NormSizes sizes{std::vector<double>(x.size()), std::vector<double>(weight.size())};
  for (int64_t i = 0; i < n; ++i) {
    double squares = 0, products = 0;
    for (int64_t c = 0; c < hidden; ++c) {
      const auto at = static_cast<size_t>(i * hidden + c);
      squares += std::pow(x[at], 2);
      products += std::abs(double{x[at]} * weight[static_cast<size_t>(c)] * d_out[at]);
    }
    const double r = 1 / std::sqrt(squares / static_cast<double>(hidden) + epsilon);
    for (int64_t c = 0; c < hidden; ++c) {
      const auto at = static_cast<size_t>(i * hidden + c);
      sizes.dx[at] = r * std::abs(weight[static_cast<size_t>(c)] * d_out[at]) +
                     r * r * r * std::abs(x[at]) * products / static_cast<double>(hidden);
      sizes.d_weight[static_cast<size_t>(c)] += r * std::abs(x[at] * d_out[at]);
    }
  }
  return sizes;
}

TEST_P(Gradients, Rmsnorm) {
  for (auto [n, hidden] :
       {std::pair<int64_t, int64_t>{1, 1}, {5, 2}, {33, 7}, {4, 64}, {70, 65}, {3, 1021}}) {
    const auto x = normal(n * hidden, 1, 3), weight = normal(hidden, 2), d_out = normal(n * hidden, 3);
    const auto dx_before = normal(n * hidden, 4), d_weight_before = normal(hidden, 5);
    auto dx = dx_before, d_weight = d_weight_before;
    auto dx_right = upcast(dx), d_weight_right = upcast(d_weight);
    rmsnorm_backward_reference(n, hidden, upcast(x).data(), upcast(weight).data(), 1e-5, upcast(d_out).data(),
                               dx_right.data(), d_weight_right.data());
    rmsnorm_backward(n, hidden, x.data(), weight.data(), 1e-5F, d_out.data(), dx.data(), d_weight.data());
    auto sizes = norm_sizes(n, hidden, x, weight, 1e-5, d_out);
    for (size_t at = 0; at < dx.size(); ++at)
      sizes.dx[at] += std::abs(dx_before[at]);
    for (size_t at = 0; at < d_weight.size(); ++at)
      sizes.d_weight[at] += std::abs(d_weight_before[at]);
    // r errs by hidden / 4 + 3 units (a sum of squares under a root, then a quotient), and stands in the
    // second term to the third power beside a sum of `hidden` products of 2 roundings; 6 roundings more.
    const auto terms = static_cast<double>(hidden);
    expect_close(dx, dx_right, sizes.dx, kUnit * (3 * (terms / 4 + 3) + terms + 2 + 6));
    // r, two products, a sum of 32 rows in fp32, the rest in double, and the last sum.
    expect_close(d_weight, d_weight_right, sizes.d_weight, kUnit * (terms / 4 + 3 + 2 + 32 + 2));
  }
}

TEST_P(Gradients, TheWeightOfAHundredThousandRowsIsAsExactAsThatOfThirtyTwo) {
  const int64_t n = 100'000, hidden = 8;
  auto x = normal(n * hidden, 1), d_out = normal(n * hidden, 2);
  const auto weight = normal(hidden, 3);
  for (float& value : d_out)
    value += 0.5F;
  for (float& value : x)
    value += 0.5F;  // sums that grow like n, where plain fp32 sums would lose their digits
  std::vector<double> dx_right(x.size()), right(weight.size());
  rmsnorm_backward_reference(n, hidden, upcast(x).data(), upcast(weight).data(), 1e-5, upcast(d_out).data(),
                             dx_right.data(), right.data());
  std::vector<float> dx(x.size()), d_weight(weight.size());
  rmsnorm_backward(n, hidden, x.data(), weight.data(), 1e-5F, d_out.data(), dx.data(), d_weight.data());
  expect_close(d_weight, right, norm_sizes(n, hidden, x, weight, 1e-5, d_out).d_weight,
               kUnit * (hidden / 4 + 3 + 2 + 32 + 2));
}

TEST_P(Gradients, Swiglu) {
  for (int64_t ffn : {1, 3, 15, 16, 17, 64, 1531}) {
    const int64_t n = 4;
    auto gate_up = normal(n * 2 * ffn, 3, 6);
    gate_up[0] = -80, gate_up[static_cast<size_t>(2 * ffn)] = 80;
    const auto d_out = normal(n * ffn, 4);
    std::vector<double> right(gate_up.size()), size(gate_up.size());
    swiglu_backward_reference(n, ffn, upcast(gate_up).data(), upcast(d_out).data(), right.data());
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t c = 0; c < ffn; ++c) {
        const auto gate = static_cast<size_t>(i * 2 * ffn + c), up = gate + static_cast<size_t>(ffn);
        const double s = 1 / (1 + std::exp(-double{gate_up[gate]}));
        size[gate] = std::abs(d_out[static_cast<size_t>(i * ffn + c)] * gate_up[up] * s) *
                     (1 + std::abs(gate_up[gate]) * (1 / (1 + std::exp(double{gate_up[gate]}))));
        size[up] = right[up];
      }
    }
    std::vector<float> got(gate_up.size(), kNan);
    swiglu_backward(n, ffn, gate_up.data(), d_out.data(), got.data());
    // The exponential errs by 2 ulp = 4 u, s by 2 u more, exp * s by 4 + 6 + 1; with the products and the sum
    // around them d_gate has 6 + 11 + 5 and d_up 6 + 2.
    expect_close(got, right, size, kUnit * 22);
    std::vector<float> in_place = gate_up;
    swiglu_backward(n, ffn, in_place.data(), d_out.data(), in_place.data());
    EXPECT_EQ(in_place, got);
  }
}

TEST_P(Gradients, SwigluFarOutIsTheLimit) {
  const std::vector<float> gate_up{-1000, -90, 1000, 90, 2, 2, 2, 2}, d_out{3, 3, 3, 3};
  std::vector<float> got(8, kNan);
  swiglu_backward(1, 4, gate_up.data(), d_out.data(), got.data());
  for (size_t at : {0, 1, 4, 5})
    EXPECT_NEAR(got[at], 0, 1e-30);
  EXPECT_EQ(got[2], 6);
  EXPECT_EQ(got[3], 6);
  EXPECT_EQ(got[6], 3000);
  EXPECT_EQ(got[7], 270);
}

TEST(EmbeddingGradient, EveryTokenAddsToItsRow) {
  for (auto [n, hidden, vocabulary] :
       {std::tuple<int64_t, int64_t, int>{1, 1, 1}, {200, 7, 50}, {1000, 128, 3}, {300, 129, 1000}}) {
    std::mt19937 random(3);
    std::vector<int32_t> tokens(static_cast<size_t>(n));
    for (int32_t& token : tokens)
      token = static_cast<int32_t>(random() % static_cast<unsigned>(vocabulary));
    const auto dx = normal(n * hidden, 1), before = normal(vocabulary * hidden, 2);
    std::vector<double> sums(before.size());
    for (int64_t i = 0; i < n; ++i)
      for (int64_t c = 0; c < hidden; ++c)
        sums[static_cast<size_t>(tokens[static_cast<size_t>(i)] * hidden + c)] +=
            static_cast<double>(dx[static_cast<size_t>(i * hidden + c)]);
    with_threads([&](int threads) {
      std::vector<float> got = before;
      embedding_backward(n, hidden, tokens.data(), dx.data(), got.data());
      for (size_t at = 0; at < got.size(); ++at)
        ASSERT_EQ(got[at], before[at] + static_cast<float>(sums[at])) << at << ", threads " << threads;
    });
  }
}

std::vector<double> transposed(int64_t rows, int64_t columns, const std::vector<float>& x) {
  std::vector<double> y(x.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      y[static_cast<size_t>(c * rows + r)] = static_cast<double>(x[static_cast<size_t>(r * columns + c)]);
  return y;
}

std::vector<double> magnitudes(std::vector<double> x) {
  for (double& value : x)
    value = std::abs(value);
  return x;
}

// c = a W^T: da = dc W is matmul with W^T for a weight, dw = dc^T a is matmul of dc^T with a^T for a weight.
TEST(MatmulGradients, AgreeWithTheDefinition) {
  for (int64_t m : {1, 3, 5, 33}) {
    for (auto [out, in] : {std::pair<int64_t, int64_t>{1, 1}, {3, 17}, {64, 64}, {65, 130}}) {
      for (Accumulate accumulate : {Accumulate::kOverwrite, Accumulate::kAdd}) {
        SCOPED_TRACE(::testing::Message() << "m " << m << " out " << out << " in " << in);
        const bool add = accumulate == Accumulate::kAdd;
        const auto dc = normal(m * out, 1), w = normal(out * in, 2), a = normal(m * in, 3);
        const auto check = [&](std::vector<float> got, int64_t rows, int64_t columns, int64_t depth,
                               const std::vector<double>& left, const std::vector<double>& right_transposed,
                               const auto& run) {
          auto right = upcast(got), size = magnitudes(right);
          matmul_reference(rows, columns, depth, left.data(), right_transposed.data(), right.data(),
                           accumulate);
          matmul_reference(rows, columns, depth, magnitudes(left).data(), magnitudes(right_transposed).data(),
                           size.data(), accumulate);
          if (!add) std::fill(got.begin(), got.end(), kNan);
          run(got.data());
          expect_close(got, right, size, static_cast<double>(depth + 1) * kUnit);  // as in matmul_test.cpp
        };
        check(normal(m * in, 4), m, in, out, upcast(dc), transposed(out, in, w),
              [&](float* da) { matmul_input_gradient(m, out, in, dc.data(), w.data(), da, accumulate); });
        check(normal(out * in, 5), out, in, m, transposed(m, out, dc), transposed(m, in, a),
              [&](float* dw) { matmul_weight_gradient(m, out, in, dc.data(), a.data(), dw, accumulate); });
      }
    }
  }
}

TEST(MatmulGradients, NoRowsAddNothing) {
  std::vector<float> dw{1, 2};
  matmul_weight_gradient(0, 1, 2, nullptr, nullptr, dw.data());
  EXPECT_EQ(dw, (std::vector<float>{1, 2}));
  matmul_weight_gradient(0, 1, 2, nullptr, nullptr, dw.data(), Accumulate::kOverwrite);
  EXPECT_EQ(dw, (std::vector<float>{0, 0}));
  matmul_input_gradient(0, 1, 2, nullptr, dw.data(), nullptr);
}

TEST_P(Gradients, SameBitsForAnyNumberOfThreads) {
  const int64_t n = 333, size = 66;
  const auto x = normal(n * 2 * size, 1), weight = normal(size, 2), d_out = normal(n * size, 3);
  std::vector<float> first_x, first_weight, first_gated;
  with_threads([&](int threads) {
    std::vector<float> dx(static_cast<size_t>(n * size)), d_weight(weight.size()), gated(x.size());
    rmsnorm_backward(n, size, x.data(), weight.data(), 1e-6F, d_out.data(), dx.data(), d_weight.data());
    swiglu_backward(n, size, x.data(), d_out.data(), gated.data());
    if (threads == 1) first_x = dx, first_weight = d_weight, first_gated = gated;
    EXPECT_EQ(dx, first_x);
    EXPECT_EQ(d_weight, first_weight);
    EXPECT_EQ(gated, first_gated);
  });
}

INSTANTIATE_TEST_SUITE_P(Cpu, Gradients, all_isas(), isa_test_name);

}  // namespace
}  // namespace longhalo::testing

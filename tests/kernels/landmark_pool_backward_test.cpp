// The gradient of landmark pooling: fp64 against central differences, fp32 against fp64.
#include <gtest/gtest.h>

#include <algorithm>

#include "differences.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"
#include "numbers.hpp"
#include "with_isa.hpp"

namespace longhalo::testing {
namespace {

class PoolingBackward : public WithIsa {};

struct Case {
  int64_t n, kv_heads, d, stride;
  bool learned;
  int64_t row() const { return kv_heads * d; }
  int64_t landmarks() const { return n / stride * row(); }
};

TEST(PoolingBackwardReference, IsTheSlope) {
  for (const Case& c : {Case{11, 2, 4, 3, true}, Case{8, 1, 3, 8, true}, Case{6, 2, 2, 1, true}}) {
    auto k = upcast(normal(c.n * c.row(), 1)), v = upcast(normal(c.n * c.row(), 2)),
         u = upcast(normal(c.row(), 3));
    const auto d_kbar = upcast(normal(c.landmarks(), 4)), d_vbar = upcast(normal(c.landmarks(), 5));
    std::vector<double> dk(k.size()), dv(v.size()), d_u(u.size()), kbar(d_kbar.size()), vbar(d_vbar.size());
    landmark_pool_backward_reference(c.n, c.kv_heads, c.d, c.stride, u.data(), k.data(), v.data(),
                                     d_kbar.data(), d_vbar.data(), dk.data(), dv.data(), d_u.data());
    const auto loss = [&] {
      landmark_pool_reference(c.n, c.kv_heads, c.d, c.stride, u.data(), k.data(), v.data(), kbar.data(),
                              vbar.data());
      return inner_product(kbar, d_kbar) + inner_product(vbar, d_vbar);
    };
    expect_slope(loss, k, dk, "dk");
    expect_slope(loss, v, dv, "dv");
    expect_slope(loss, u, d_u, "d_landmark_query");
  }
}

double longest_row(const std::vector<float>& x, int64_t d) {
  double longest = 0;
  for (size_t at = 0; at < x.size(); at += static_cast<size_t>(d)) {
    double squares = 0;
    for (size_t i = at; i < at + static_cast<size_t>(d); ++i)
      squares += std::pow(x[i], 2);
    longest = std::max(longest, squares);
  }
  return std::sqrt(longest);
}

double row_error(const std::vector<float>& got, const std::vector<double>& right, size_t row, size_t d) {
  double squares = 0;
  for (size_t at = row * d; at < (row + 1) * d; ++at)
    squares += std::pow(got[at] - right[at], 2);
  return std::sqrt(squares);
}

// With u = 2^-24, A = |u| max|k| / sqrt(d) and G = max|d_kbar| max|k| + max|d_vbar| max|v| (both norms of
// rows):
//   a weight a_j errs by alpha = (2 (d + 2) A + stride + 8) u, relative (score, exponential, sum);
//   g_j and sum a g are at most G and err by (d + 2) u G, and (d + 2 + alpha / u + 8) u G;
//   ds_j = a_j (g_j - sum a g), at most 2 a_j G, thus by a_j G (2 (d + 2) + 8 + 3 alpha / u + 4) u =: a_j G
//   e.
// Absolute errors in the 2-norm: dk_j: a_j (|d_kbar| (alpha + 2 u) + G e |u| / sqrt(d)); dv_j: a_j |d_vbar|
// (alpha + 2 u); d_u, a sum over `segments` sums of `stride` terms: segments G max|k| / sqrt(d) (e + 2 stride
// u). Each is added to something of size `before`: one rounding more.
TEST_P(PoolingBackward, AgreesWithTheReference) {
  for (const Case& c : {Case{1, 1, 8, 1, true}, Case{50, 2, 16, 7, false}, Case{50, 2, 16, 7, true},
                        Case{300, 3, 64, 128, true}, Case{257, 1, 128, 64, true}, Case{129, 2, 24, 65, true},
                        Case{129, 2, 20, 43, true}, Case{20, 2, 8, 32, true}}) {
    const auto k = normal(c.n * c.row(), 1), v = normal(c.n * c.row(), 2), u = normal(c.row(), 3);
    const auto d_kbar = normal(c.landmarks(), 4), d_vbar = normal(c.landmarks(), 5);
    auto dk = normal(c.n * c.row(), 6), dv = normal(c.n * c.row(), 7), d_u = normal(c.row(), 8);
    auto dk_right = upcast(dk), dv_right = upcast(dv), d_u_right = upcast(d_u);
    const double before = std::max({longest_row(dk, c.d), longest_row(dv, c.d), longest_row(d_u, c.d)});
    const auto u64 = upcast(u);
    landmark_pool_backward_reference(
        c.n, c.kv_heads, c.d, c.stride, c.learned ? u64.data() : nullptr, upcast(k).data(), upcast(v).data(),
        upcast(d_kbar).data(), upcast(d_vbar).data(), dk_right.data(), dv_right.data(), d_u_right.data());
    const LandmarkPool pool{c.kv_heads, c.d, c.stride, c.learned ? u.data() : nullptr};
    landmark_pool_backward(pool, c.n, k.data(), v.data(), d_kbar.data(), d_vbar.data(), dk.data(), dv.data(),
                           d_u.data());
    const auto d = static_cast<double>(c.d), stride = static_cast<double>(c.stride);
    const double longest_u = c.learned ? longest_row(u, c.d) / std::sqrt(d) : 0,
                 longest_k = longest_row(k, c.d);
    const double d_k = longest_row(d_kbar, c.d), d_v = longest_row(d_vbar, c.d);
    const double gain = d_k * longest_k + d_v * longest_row(v, c.d);
    const double alpha = (2 * (d + 2) * longest_u * longest_k + stride + 8) * kUnit;
    const double e = (2 * (d + 2) + 12) * kUnit + 3 * alpha;
    const auto rows = static_cast<size_t>(c.n * c.kv_heads), width = static_cast<size_t>(c.d);
    for (size_t row = 0; row < rows; ++row) {
      ASSERT_LE(row_error(dk, dk_right, row, width),
                d_k * (alpha + 2 * kUnit) + gain * e * longest_u + before * 2 * kUnit);
      ASSERT_LE(row_error(dv, dv_right, row, width), d_v * (alpha + 2 * kUnit) + before * 2 * kUnit);
    }
    for (size_t h = 0; h < static_cast<size_t>(c.kv_heads); ++h)
      ASSERT_LE(row_error(d_u, d_u_right, h, width), static_cast<double>(c.n / c.stride) * gain * longest_k /
                                                             std::sqrt(d) * (e + 2 * stride * kUnit) +
                                                         before * 2 * kUnit);
  }
}

// A mean of whole numbers, by hand: every token gets 1 / stride of the landmark's gradient, those behind
// nothing.
TEST_P(PoolingBackward, WithoutAQueryGradientsAreSharedEvenly) {
  const int64_t n = 70, d = 8, stride = 32;
  std::vector<float> k(n * d, 3), v(k), d_kbar(2 * d), d_vbar(2 * d), dk(k.size(), 1), dv(k.size(), 2);
  for (size_t at = 0; at < d_kbar.size(); ++at)
    d_kbar[at] = static_cast<float>(32 * at), d_vbar[at] = -d_kbar[at];
  landmark_pool_backward({1, d, stride, nullptr}, n, k.data(), v.data(), d_kbar.data(), d_vbar.data(),
                         dk.data(), dv.data(), nullptr);
  for (size_t at = 0; at < dk.size(); ++at) {
    const auto token = static_cast<int64_t>(at) / d;
    const float share =
        token < 64 ? static_cast<float>(token / stride * d + static_cast<int64_t>(at) % d) : 0;
    EXPECT_EQ(dk[at], 1 + share);
    EXPECT_EQ(dv[at], 2 - share);
  }
}

TEST_P(PoolingBackward, SameBitsForAnyNumberOfThreads) {
  const Case c{500, 3, 64, 64, true};
  const auto k = normal(c.n * c.row(), 1), v = normal(c.n * c.row(), 2), u = normal(c.row(), 3);
  const auto d_kbar = normal(c.landmarks(), 4), d_vbar = normal(c.landmarks(), 5);
  std::vector<float> first_k, first_v, first_u;
  with_threads([&](int threads) {
    std::vector<float> dk(k.size()), dv(v.size()), d_u(u.size());
    landmark_pool_backward({c.kv_heads, c.d, c.stride, u.data()}, c.n, k.data(), v.data(), d_kbar.data(),
                           d_vbar.data(), dk.data(), dv.data(), d_u.data());
    if (threads == 1) first_k = dk, first_v = dv, first_u = d_u;
    EXPECT_EQ(dk, first_k);
    EXPECT_EQ(dv, first_v);
    EXPECT_EQ(d_u, first_u);
  });
}

INSTANTIATE_TEST_SUITE_P(Cpu, PoolingBackward, all_isas(), isa_test_name);

}  // namespace
}  // namespace longhalo::testing

// Landmark pooling against its fp64 definition, in any portions.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "kernels/landmark_pool/landmark_pool.hpp"
#include "numbers.hpp"
#include "with_isa.hpp"

namespace longhalo::testing {
namespace {

class Pooling : public WithIsa {};

struct Case {
  int64_t n, kv_heads, d, stride;
  bool learned;
};

struct Pooled {
  std::vector<float> kbar, vbar;
};

Pooled pool_in_portions(const Case& c, const std::vector<float>& u, const std::vector<float>& k,
                        const std::vector<float>& v, const std::vector<int64_t>& portions) {
  const int64_t row = c.kv_heads * c.d;
  const LandmarkPool pool{c.kv_heads, c.d, c.stride, c.learned ? u.data() : nullptr};
  LandmarkPoolState state(c.kv_heads, c.d);
  const auto size = static_cast<size_t>(c.n / c.stride * row);
  Pooled pooled{std::vector<float>(size, std::numeric_limits<float>::quiet_NaN()), {}};
  pooled.vbar = pooled.kbar;
  int64_t done = 0, at = 0;
  for (size_t p = 0; at < c.n; ++p) {
    const int64_t count = std::min(portions[p % portions.size()], c.n - at);
    const int64_t completed = landmark_pool(pool, count, k.data() + at * row, v.data() + at * row, state,
                                            pooled.kbar.data() + done * row, pooled.vbar.data() + done * row);
    at += count;
    done += completed;
    EXPECT_EQ(done, at / c.stride);
    EXPECT_EQ(state.tokens, at % c.stride);
  }
  return pooled;
}

TEST_P(Pooling, AgreesWithTheDefinitionInAnyPortions) {
  for (const Case& c : {Case{1, 1, 8, 1, true}, Case{50, 2, 16, 7, false}, Case{50, 2, 16, 7, true},
                        Case{300, 3, 64, 128, true}, Case{257, 1, 128, 64, true}, Case{129, 2, 24, 65, true},
                        Case{20, 2, 8, 32, true}}) {
    const auto k = normal(c.n * c.kv_heads * c.d, 1), v = normal(c.n * c.kv_heads * c.d, 2);
    const auto u = normal(c.kv_heads * c.d, 3);
    const auto size = static_cast<size_t>(c.n / c.stride * c.kv_heads * c.d);
    std::vector<double> kbar(size), vbar(size), k_size(size), v_size(size);
    const auto u64 = upcast(u), k64 = upcast(k), v64 = upcast(v);
    landmark_pool_reference(c.n, c.kv_heads, c.d, c.stride, c.learned ? u64.data() : nullptr, k64.data(),
                            v64.data(), kbar.data(), vbar.data());
    // Weights: a score is a sum of d products (at most (d + 2) u of |u| |k| / sqrt(d)), then exp (4 u, and
    // the running rescale). Sums of `stride` positive weights times |x|: at most stride u, relative to max
    // |x|, which bounds the weighted mean of magnitudes.
    double largest = 0, longest_u = 0, longest_k = 0;
    for (const auto* x : {&k, &v})
      for (float value : *x)
        largest = std::max(largest, static_cast<double>(std::abs(value)));
    for (size_t at = 0; at < u.size(); ++at)
      longest_u += u[at] * u[at];
    for (size_t at = 0; at < k.size(); at += static_cast<size_t>(c.d)) {
      double squares = 0;
      for (size_t i = at; i < at + static_cast<size_t>(c.d); ++i)
        squares += k[i] * k[i];
      longest_k = std::max(longest_k, squares);
    }
    const auto d = static_cast<double>(c.d);
    const double score = c.learned ? std::sqrt(longest_u * longest_k / d) : 0;
    const double tolerance = kUnit * (2 * (d + 2) * score + 2 * static_cast<double>(c.stride) + 16);
    const std::vector<double> sizes(size, largest);
    for (const auto& portions :
         std::vector<std::vector<int64_t>>{{c.n}, {1}, {3, 64, 1}, {c.stride}, {129, 5}}) {
      const Pooled got = pool_in_portions(c, u, k, v, portions);
      expect_close(got.kbar, kbar, sizes, tolerance);
      expect_close(got.vbar, vbar, sizes, tolerance);
    }
  }
}

TEST_P(Pooling, WithoutAQueryItIsTheMean) {
  const Case c{96, 2, 8, 32, false};
  std::vector<float> k(static_cast<size_t>(c.n * 16)), v(k.size());
  for (size_t at = 0; at < k.size(); ++at)
    k[at] = static_cast<float>(at / 16), v[at] = -k[at];
  const Pooled got = pool_in_portions(c, {}, k, v, {96});
  for (size_t at = 0; at < got.kbar.size();
       ++at) {  // whole numbers below 2^24: exact, and so is the division by 32
    EXPECT_EQ(got.kbar[at], static_cast<float>(at / 16) * 32 + 15.5F);
    EXPECT_EQ(got.vbar[at], -got.kbar[at]);
  }
}

TEST_P(Pooling, SameBitsForAnyNumberOfThreads) {
  const Case c{500, 3, 64, 64, true};
  const auto k = normal(c.n * 192, 1), v = normal(c.n * 192, 2), u = normal(192, 3);
  Pooled first;
  with_threads([&](int threads) {
    const Pooled got = pool_in_portions(c, u, k, v, {300, 200});
    if (threads == 1) first = got;
    EXPECT_EQ(got.kbar, first.kbar);
    EXPECT_EQ(got.vbar, first.vbar);
  });
}

INSTANTIATE_TEST_SUITE_P(Cpu, Pooling, all_isas(), isa_test_name);

}  // namespace
}  // namespace longhalo::testing

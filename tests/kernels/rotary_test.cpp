// The rotary embedding against its fp64 definition, and its frequencies against worked values.
#include <gtest/gtest.h>

#include <numbers>

#include "kernels/rotary/rotary.hpp"
#include "numbers.hpp"
#include "with_isa.hpp"

namespace longhalo::testing {
namespace {

class Rotary : public WithIsa {};

std::vector<float> rotated(std::vector<float> x, int64_t heads, int64_t d,
                           const std::vector<double>& frequencies, double first_position, double step) {
  rotary(static_cast<int64_t>(x.size()) / (heads * d), heads, d, frequencies, first_position, step, x.data());
  return x;
}

TEST_P(Rotary, AgreesWithTheDefinition) {
  struct Case {
    int64_t n, heads, d;
    double first_position, step;
  };
  for (const Case& c :
       {Case{1, 1, 2, 0, 1}, Case{1, 3, 64, 31, 1}, Case{2, 2, 64, 31, 1}, Case{40, 2, 64, 30, 1},
        Case{100, 1, 128, 10'000'000, 1}, Case{33, 2, 40, 127.5, 256}, Case{7, 1, 8, 2559.5, 512},
        Case{3, 1, 16, 5.25, 0}, Case{65, 1, 256, 63, 1}, Case{31, 2, 80, 32, 1}}) {
    const auto frequencies = rotary_frequencies(c.d, 100000);
    const auto x = normal(c.n * c.heads * c.d, 1);
    auto right = upcast(x);
    rotary_reference(c.n, c.heads, c.d, frequencies, c.first_position, c.step, right.data());
    // |x| of the pair is the size: the sine and cosine are rounded once (u), then two products and a sum (3
    // u); angles are right to 2^-52 of a position of 2^24, which is far less.
    std::vector<double> size(x.size());
    for (size_t row = 0; row < x.size(); row += static_cast<size_t>(c.d)) {
      for (size_t at = 0; at < static_cast<size_t>(c.d); ++at) {
        const size_t other = (at + static_cast<size_t>(c.d / 2)) % static_cast<size_t>(c.d);
        size[row + at] = std::hypot(x[row + at], x[row + other]);
      }
    }
    expect_close(rotated(x, c.heads, c.d, frequencies, c.first_position, c.step), right, size, 4 * kUnit);
  }
}

// The transpose, which for a rotation is the inverse: <R x, y> = <x, R^T y>, and R^T R x = x.
TEST_P(Rotary, BackwardIsTheTransposeAndTheInverse) {
  const int64_t n = 50, heads = 3, d = 16;
  const auto frequencies = rotary_frequencies(d, 10000);
  for (auto [first, step] : {std::pair<double, double>{1000, 1}, {127.5, 256}}) {
    const auto x = normal(n * heads * d, 1), y = normal(n * heads * d, 2);
    auto turned = upcast(x), back = upcast(y);
    rotary_reference(n, heads, d, frequencies, first, step, turned.data());
    rotary_reference(n, heads, d, frequencies, first, step, back.data(), RotaryDirection::kBackward);
    double left = 0, right = 0, size = 0;
    for (size_t at = 0; at < x.size(); ++at) {
      left += turned[at] * y[at];
      right += x[at] * back[at];
      size += std::abs(turned[at] * y[at]);
    }
    EXPECT_NEAR(left, right, size * 1e-13);
    std::vector<float> got = x;
    rotary(n, heads, d, frequencies, first, step, got.data());
    rotary(n, heads, d, frequencies, first, step, got.data(), RotaryDirection::kBackward);
    std::vector<float> got_back = y;
    rotary(n, heads, d, frequencies, first, step, got_back.data(), RotaryDirection::kBackward);
    for (size_t row = 0; row < x.size(); row += static_cast<size_t>(d)) {
      for (size_t at = row; at < row + static_cast<size_t>(d); ++at) {
        const size_t other = row + (at - row + static_cast<size_t>(d / 2)) % static_cast<size_t>(d);
        // 4 u of the pair's length a turn (AgreesWithTheDefinition), and each turn's error is turned on:
        // sqrt 2.
        ASSERT_NEAR(got[at], x[at], (4 + 4 * 1.5) * kUnit * std::hypot(x[at], x[other]));
        ASSERT_NEAR(got_back[at], back[at], 4 * kUnit * std::hypot(y[at], y[other]));
      }
    }
  }
}

TEST_P(Rotary, ARowDoesNotDependOnTheTileItComesIn) {
  const int64_t heads = 2, d = 64, row = heads * d;
  const auto frequencies = rotary_frequencies(d, 10000);
  const auto x = normal(100 * row, 2);
  const auto whole = rotated(x, heads, d, frequencies, 1000, 1);
  for (int64_t first : {0, 1, 23, 24, 25, 99}) {
    const std::vector<float> part(x.begin() + first * row, x.end());
    const auto got = rotated(part, heads, d, frequencies, 1000 + static_cast<double>(first), 1);
    EXPECT_TRUE(std::equal(got.begin(), got.end(), whole.begin() + first * row)) << first;
  }
  with_threads([&](int) { EXPECT_EQ(rotated(x, heads, d, frequencies, 1000, 1), whole); });
}

TEST(RotaryFrequencies, PlainAreAGeometricSeries) {
  const auto f = rotary_frequencies(8, 10000);
  ASSERT_EQ(f.size(), 4U);
  for (size_t c = 0; c < 4; ++c)
    EXPECT_NEAR(f[c], std::pow(10.0, -static_cast<double>(c)), 1e-15);
}

TEST(RotaryFrequencies, Llama3LeavesFastOnesDividesSlowOnesAndBlendsBetween) {
  const Llama3RopeScaling scaling{8, 1, 4, 8192};
  const auto plain = rotary_frequencies(128, 500000), scaled = rotary_frequencies(128, 500000, &scaling);
  int kept = 0, divided = 0, blended = 0;
  for (size_t c = 0; c < plain.size(); ++c) {
    const double wavelength = 2 * std::numbers::pi / plain[c];
    if (wavelength < 8192.0 / 4) {
      EXPECT_EQ(scaled[c], plain[c]);
      ++kept;
    } else if (wavelength > 8192.0) {
      EXPECT_DOUBLE_EQ(scaled[c], plain[c] / 8);
      ++divided;
    } else {
      // Half-way in 8192 / wavelength, between 1 and 4, would be half-way between plain and plain / 8.
      const double smooth = (8192 / wavelength - 1) / 3;
      EXPECT_NEAR(scaled[c] / plain[c], 1.0 / 8 + smooth * 7 / 8, 1e-12);
      ++blended;
    }
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(divided, 0);
  EXPECT_GT(blended, 0);
}

INSTANTIATE_TEST_SUITE_P(Cpu, Rotary, all_isas(), isa_test_name);

}  // namespace
}  // namespace longhalo::testing

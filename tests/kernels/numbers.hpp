// Arrays for the kernel tests and the one comparison they share.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace longhalo::testing {

inline constexpr double kUnit = 0x1p-24;  // u: half a unit in the last place of 1.0f

inline std::vector<float> normal(int64_t count, unsigned seed, float size = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution(0, size);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& value : x)
    value = distribution(random);
  return x;
}

inline std::vector<double> upcast(const std::vector<float>& x) {
  return {x.begin(), x.end()};
}

/// Every |got - right| is at most tolerance * size (size: the magnitude that the error is relative to, per
/// element).
inline void expect_close(const std::vector<float>& got, const std::vector<double>& right,
                         const std::vector<double>& size, double tolerance) {
  ASSERT_EQ(got.size(), right.size());
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_LE(std::abs(got[i] - right[i]), tolerance * std::abs(size[i]))
        << "element " << i << ": " << got[i] << " instead of " << right[i];
}

}  // namespace longhalo::testing

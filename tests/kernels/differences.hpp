// Central differences: whether an fp64 gradient is the slope of a loss.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace longhalo::testing {

/// loss() is a function of x, of order 1 to 100 with third derivatives of that order. Moved by 1e-5 both
/// ways, the difference errs by 1e-10 times a third derivative and by 1e-16 |loss| / 1e-5 from rounding: 1e-8
/// leaves a margin, and a wrong term is far larger.
template <class Loss>
void expect_slope(const Loss& loss, std::vector<double>& x, const std::vector<double>& gradient,
                  const char* what) {
  constexpr double kStep = 1e-5, kTolerance = 1e-8;
  ASSERT_EQ(x.size(), gradient.size()) << what;
  for (size_t at = 0; at < x.size(); ++at) {
    const double before = x[at];
    x[at] = before + kStep;
    const double above = loss();
    x[at] = before - kStep;
    const double below = loss();
    x[at] = before;
    ASSERT_NEAR(gradient[at], (above - below) / (2 * kStep), kTolerance * (1 + std::abs(gradient[at])))
        << what << ", element " << at;
  }
}

inline double inner_product(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t at = 0; at < a.size(); ++at)
    sum += a[at] * b[at];
  return sum;
}

}  // namespace longhalo::testing

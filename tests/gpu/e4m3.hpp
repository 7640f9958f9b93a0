// e4m3 on the host, from its definition: bias 7, three bits of fraction, no infinity.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace longhalo::testing {

inline double e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);  // bias 7, 3 bits
  if ((code & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// The nearest of all e4m3 numbers, the even code of two as near; beyond the largest, the largest.
inline uint8_t e4m3_code(float x) {
  if (std::isnan(x)) return 0x7f;
  static const std::vector<double> values = [] {
    std::vector<double> all;
    for (int code = 0; code < 0x7f; ++code)
      all.push_back(e4m3_value(static_cast<uint8_t>(code)));
    return all;
  }();
  const double magnitude = std::abs(static_cast<double>(x));
  const auto above = std::lower_bound(values.begin(), values.end(), magnitude);
  auto code = static_cast<int>(above - values.begin());
  if (above == values.end()) {
    code = 0x7e;
  } else if (code > 0) {
    const double up = *above - magnitude, down = magnitude - values[static_cast<size_t>(code - 1)];
    if (down < up || (down == up && code % 2 == 1)) --code;
  }
  return static_cast<uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
}

}  // namespace longhalo::testing

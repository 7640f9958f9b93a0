#include <cmath>

#include "core/error.hpp"
#include "kernels/rotary/rotary.hpp"

namespace longhalo {

void rotary_reference(int64_t n, int64_t heads, int64_t head_dim, const std::vector<double>& frequencies,
                      double first_position, double step, double* x, RotaryDirection direction) {
  const int64_t half = head_dim / 2;
  check(static_cast<int64_t>(frequencies.size()) == half, "rotary has one frequency a pair of dimensions");
  for (int64_t i = 0; i < n; ++i) {
    const double sign = direction == RotaryDirection::kForward ? 1 : -1;
    const double position = first_position + static_cast<double>(i) * step;
    for (int64_t h = 0; h < heads; ++h) {
      double* row = x + (i * heads + h) * head_dim;
      for (int64_t c = 0; c < half; ++c) {
        const double angle = sign * position * frequencies[static_cast<size_t>(c)];
        const double first = row[c], second = row[c + half];
        row[c] = first * std::cos(angle) - second * std::sin(angle);
        row[c + half] = second * std::cos(angle) + first * std::sin(angle);
      }
    }
  }
}

}  // namespace longhalo

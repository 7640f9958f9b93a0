#include <cmath>

#include "core/error.hpp"
#include "kernels/rotary/rotary.hpp"

namespace longhalo {

void rotary(int64_t n, int64_t heads, int64_t head_dim, const std::vector<double>& frequencies,
            double first_position, double step, float* x) {
  const int64_t half = head_dim / 2;
  check(static_cast<int64_t>(frequencies.size()) == half, "rotary has one frequency a pair of dimensions");
#pragma omp parallel for
  for (int64_t i = 0; i < n; ++i) {
    const double position = first_position + static_cast<double>(i) * step;
    for (int64_t c = 0; c < half; ++c) {
      const double angle = position * frequencies[static_cast<size_t>(c)];
      const auto cosine = static_cast<float>(std::cos(angle));
      const auto sine = static_cast<float>(std::sin(angle));
      for (int64_t h = 0; h < heads; ++h) {
        float* row = x + (i * heads + h) * head_dim;
        const float first = row[c], second = row[c + half];
        row[c] = first * cosine - second * sine;
        row[c + half] = second * cosine + first * sine;
      }
    }
  }
}

}  // namespace longhalo

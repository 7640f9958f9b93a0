#include <cmath>

#include "core/error.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"

namespace longhalo {

void rmsnorm(int64_t n, int64_t hidden, const float* x, const float* weight, float epsilon, float* out) {
  check(n >= 0 && hidden >= 1, "RMSNorm has rows of at least one element");
#pragma omp parallel for
  for (int64_t i = 0; i < n; ++i) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < hidden; ++c)
      squares += x[i * hidden + c] * x[i * hidden + c];
    const float factor = 1.0F / std::sqrt(squares / static_cast<float>(hidden) + epsilon);
    for (int64_t c = 0; c < hidden; ++c)
      out[i * hidden + c] = x[i * hidden + c] * factor * weight[c];
  }
}

}  // namespace longhalo

#include <cmath>

#include "core/error.hpp"
#include "kernels/swiglu/swiglu.hpp"

namespace longhalo {

void swiglu(int64_t n, int64_t ffn, const float* gate_up, float* out) {
  check(n >= 0 && ffn >= 1, "SwiGLU has rows of at least one element");
#pragma omp parallel for
  for (int64_t i = 0; i < n; ++i) {
    const float* gate = gate_up + i * 2 * ffn;
    for (int64_t c = 0; c < ffn; ++c)
      out[i * ffn + c] = gate[c] / (1.0F + std::exp(-gate[c])) * gate[ffn + c];
  }
}

}  // namespace longhalo

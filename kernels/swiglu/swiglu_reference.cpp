#include <cmath>

#include "kernels/swiglu/swiglu.hpp"

namespace longhalo {

void swiglu_reference(int64_t n, int64_t ffn, const double* gate_up, double* out) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < ffn; ++c) {
      const double gate = gate_up[i * 2 * ffn + c];
      out[i * ffn + c] = gate / (1.0 + std::exp(-gate)) * gate_up[i * 2 * ffn + ffn + c];
    }
  }
}

}  // namespace longhalo

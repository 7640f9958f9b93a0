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

void swiglu_backward_reference(int64_t n, int64_t ffn, const double* gate_up, const double* d_out,
                               double* d_gate_up) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < ffn; ++c) {
      const double gate = gate_up[i * 2 * ffn + c], up = gate_up[i * 2 * ffn + ffn + c];
      const double s = 1.0 / (1.0 + std::exp(-gate));
      d_gate_up[i * 2 * ffn + c] = d_out[i * ffn + c] * up * s * (1.0 + gate * (1.0 - s));
      d_gate_up[i * 2 * ffn + ffn + c] = d_out[i * ffn + c] * gate * s;
    }
  }
}

}  // namespace longhalo

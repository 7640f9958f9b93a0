#include "core/error.hpp"
#include "kernels/swiglu/swiglu.hpp"
#include "kernels/swiglu/swiglu_simd.hpp"

namespace longhalo {

void swiglu(int64_t n, int64_t ffn, const float* gate_up, float* out) {
  check(n >= 0 && ffn >= 1, "SwiGLU has rows of at least one element");
  const SwigluKernels& kernels = LONGHALO_SIMD(swiglu_kernels);
#pragma omp parallel for if (n > 1)
  for (int64_t i = 0; i < n; ++i)
    kernels.row(ffn, gate_up + i * 2 * ffn, gate_up + i * 2 * ffn + ffn, out + i * ffn);
}

void swiglu_backward(int64_t n, int64_t ffn, const float* gate_up, const float* d_out, float* d_gate_up) {
  check(n >= 0 && ffn >= 1, "SwiGLU has rows of at least one element");
  const SwigluKernels& kernels = LONGHALO_SIMD(swiglu_kernels);
#pragma omp parallel for if (n > 1)
  for (int64_t i = 0; i < n; ++i) {
    const float* gate = gate_up + i * 2 * ffn;
    float* d_gate = d_gate_up + i * 2 * ffn;
    kernels.gradient(ffn, gate, gate + ffn, d_out + i * ffn, d_gate, d_gate + ffn);
  }
}

}  // namespace longhalo

// The inner loops of SwiGLU and of its gradient, one version an instruction set.
#pragma once

#include <cstdint>

#include "kernels/common/isa.hpp"

namespace longhalo {

struct SwigluKernels {
  void (*row)(int64_t ffn, const float* gate, const float* up, float* out);
  void (*gradient)(int64_t ffn, const float* gate, const float* up, const float* d_out, float* d_gate,
                   float* d_up);  // d_gate and d_up may be gate and up
};

LONGHALO_DECLARE_SIMD(SwigluKernels, swiglu_kernels)

}  // namespace longhalo

// The inner loop of SwiGLU, one version an instruction set.
#pragma once

#include <cstdint>

#include "kernels/common/isa.hpp"

namespace longhalo {

struct SwigluKernels {
  void (*row)(int64_t ffn, const float* gate, const float* up, float* out);
};

LONGHALO_DECLARE_SIMD(SwigluKernels, swiglu_kernels)

}  // namespace longhalo

// The inner loop of RMSNorm, one version an instruction set.
#pragma once

#include <cstdint>

#include "kernels/common/isa.hpp"

namespace longhalo {

struct RmsnormKernels {
  void (*row)(int64_t hidden, const float* x, const float* weight, float epsilon,
              float* out);  // out may be x
};

LONGHALO_DECLARE_SIMD(RmsnormKernels, rmsnorm_kernels)

}  // namespace longhalo

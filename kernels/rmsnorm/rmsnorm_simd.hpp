// The inner loops of RMSNorm and of its gradient, one version an instruction set.
#pragma once

#include <cstdint>

#include "kernels/common/isa.hpp"

namespace longhalo {

struct RmsnormKernels {
  void (*row)(int64_t hidden, const float* x, const float* weight, float epsilon,
              float* out);  // out may be x
  /// Adds to dx and to d_weight.
  void (*gradient)(int64_t hidden, const float* x, const float* weight, float epsilon, const float* d_out,
                   float* dx, float* d_weight);
};

LONGHALO_DECLARE_SIMD(RmsnormKernels, rmsnorm_kernels)

}  // namespace longhalo

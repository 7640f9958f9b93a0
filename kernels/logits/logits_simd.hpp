// The passes over a row of logits, one version an instruction set.
#pragma once

#include <cstdint>

#include "kernels/common/isa.hpp"

namespace longhalo {

struct LogitsKernels {
  /// Largest of count >= 1 numbers, or NaN if one is NaN.
  float (*largest)(int64_t count, const float* x);
  /// Sum of exp(x - top) for x <= top.
  double (*sum_exp)(int64_t count, const float* x, float top);
  /// x = factor * exp(x - top) for x <= top, in place.
  void (*scaled_exp)(int64_t count, float top, float factor, float* x);
};

LONGHALO_DECLARE_SIMD(LogitsKernels, logits_kernels)

}  // namespace longhalo

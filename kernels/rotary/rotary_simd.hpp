// The inner loops of the rotary embedding, one version an instruction set.
#pragma once

#include <cstdint>

#include "kernels/common/isa.hpp"

namespace longhalo {

/// Cosines and sines of one position's angles [d/2].
struct Turn {
  const double* cosine;
  const double* sine;
};

struct RotaryKernels {
  /// Rotates one row x [heads, 2 * half] by the sum of two turns; `table` is scratch [2 * half].
  void (*row)(int64_t heads, int64_t half, Turn anchor, Turn offset, float* table, float* x);
};

LONGHALO_DECLARE_SIMD(RotaryKernels, rotary_kernels)

}  // namespace longhalo

// The inner loop of landmark pooling, one version an instruction set.
#pragma once

#include <cstdint>

#include "kernels/common/isa.hpp"

namespace longhalo {

/// One head's open segment: running maximum, sum and weighted sums [d].
struct OpenSegment {
  float m, l;
  float* k_sum;
  float* v_sum;
};

struct LandmarkPoolKernels {
  /// Adds `tokens` tokens, `stride` floats apart. u [d] is already scaled by d^-1/2; nullptr is 0.
  void (*add)(int64_t tokens, int64_t d, int64_t stride, const float* u, const float* k, const float* v,
              OpenSegment& open);
};

LONGHALO_DECLARE_SIMD(LandmarkPoolKernels, landmark_pool_kernels)

}  // namespace longhalo

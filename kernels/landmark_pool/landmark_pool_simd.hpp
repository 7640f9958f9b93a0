// The inner loops of landmark pooling and of its gradient, one version an instruction set.
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

/// One head's whole segment; rows are `stride` floats apart in k, v, dk and dv.
struct SegmentGradient {
  int64_t tokens, d, stride;
  const float* u;  // [d] scaled by d^-1/2; nullptr is 0
  const float* k;
  const float* v;
  const float* d_kbar;  // [d]
  const float* d_vbar;  // [d]
  float* dk;            // added into
  float* dv;            // added into
  float* d_u;           // [d] set to sum ds k; nullptr: not wanted
  float* weight;        // scratch [tokens]
  float* d_score;       // scratch [tokens]
};

struct LandmarkPoolKernels {
  /// Adds `tokens` tokens, `stride` floats apart. u [d] is already scaled by d^-1/2; nullptr is 0.
  void (*add)(int64_t tokens, int64_t d, int64_t stride, const float* u, const float* k, const float* v,
              OpenSegment& open);
  void (*gradient)(const SegmentGradient& segment);
};

LONGHALO_DECLARE_SIMD(LandmarkPoolKernels, landmark_pool_kernels)

}  // namespace longhalo

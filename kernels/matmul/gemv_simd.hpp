// Matrix-vector products for a few rows at once (decode), one version an instruction set.
#pragma once

#include <cstdint>

#include "kernels/common/isa.hpp"

namespace longhalo {

inline constexpr int64_t kMaxGemvRows = 4;

struct GemvKernels {
  /// c[i * out + o] (+)= a[i, :] . w[o, :] for i < m <= kMaxGemvRows and o in [begin, end); each weight is
  /// read once. A result does not depend on begin and end.
  void (*columns)(int64_t m, int64_t out, int64_t in, int64_t begin, int64_t end, const float* a,
                  const float* w, float* c, bool add);
};

LONGHALO_DECLARE_SIMD(GemvKernels, gemv_kernels)

}  // namespace longhalo

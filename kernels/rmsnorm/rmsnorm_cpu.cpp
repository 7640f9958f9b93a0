#include "core/error.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/rmsnorm/rmsnorm_simd.hpp"

namespace longhalo {

void rmsnorm(int64_t n, int64_t hidden, const float* x, const float* weight, float epsilon, float* out) {
  check(n >= 0 && hidden >= 1, "RMSNorm has rows of at least one element");
  const RmsnormKernels& kernels = LONGHALO_SIMD(rmsnorm_kernels);
#pragma omp parallel for if (n > 1)
  for (int64_t i = 0; i < n; ++i)
    kernels.row(hidden, x + i * hidden, weight, epsilon, out + i * hidden);
}

}  // namespace longhalo

#include <omp.h>

#include <cmath>
#include <vector>

#include "core/error.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"
#include "kernels/landmark_pool/landmark_pool_simd.hpp"

namespace longhalo {

void landmark_pool_backward(const LandmarkPool& pool, int64_t n, const float* k, const float* v,
                            const float* d_kbar, const float* d_vbar, float* dk, float* dv,
                            float* d_landmark_query) {
  const int64_t d = pool.head_dim, row = pool.kv_heads * d;
  check(n >= 0 && pool.stride >= 1 && pool.kv_heads >= 1 && d >= 1,
        "landmark pooling has a positive stride and shape");
  const int64_t segments = n / pool.stride;
  if (segments == 0) return;
  const auto root = std::sqrt(static_cast<float>(d));
  std::vector<float> u;  // scaled by d^-1/2
  if (pool.landmark_query != nullptr) {
    u.assign(pool.landmark_query, pool.landmark_query + row);
    for (float& x : u)
      x /= root;
  }
  const bool wanted = d_landmark_query != nullptr;
  std::vector<float> d_u(wanted ? static_cast<size_t>(segments * row) : 0);  // [segments, H_kv, d]
  std::vector<float> scratch(static_cast<size_t>(2 * pool.stride * omp_get_max_threads()));
  const LandmarkPoolKernels& kernels = LONGHALO_SIMD(landmark_pool_kernels);
#pragma omp parallel for collapse(2)
  for (int64_t g = 0; g < segments; ++g) {
    for (int64_t h = 0; h < pool.kv_heads; ++h) {
      const int64_t token = g * pool.stride * row + h * d, landmark = g * row + h * d;
      float* own = scratch.data() + 2 * pool.stride * omp_get_thread_num();
      kernels.gradient({pool.stride, d, row, u.empty() ? nullptr : u.data() + h * d, k + token, v + token,
                        d_kbar + landmark, d_vbar + landmark, dk + token, dv + token,
                        wanted ? d_u.data() + landmark : nullptr, own, own + pool.stride});
    }
  }
  for (int64_t at = 0; wanted && at < row; ++at) {
    double sum = 0;
    for (int64_t g = 0; g < segments; ++g)
      sum += static_cast<double>(d_u[static_cast<size_t>(g * row + at)]);
    d_landmark_query[at] += static_cast<float>(sum) / root;
  }
}

}  // namespace longhalo

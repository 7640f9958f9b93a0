#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"

namespace longhalo {

void landmark_pool_reference(int64_t n, int64_t kv_heads, int64_t head_dim, int64_t stride, const double* u,
                             const double* k, const double* v, double* kbar, double* vbar) {
  check(stride >= 1 && kv_heads >= 1 && head_dim >= 1, "landmark pooling has a positive stride and shape");
  std::vector<double> weight(static_cast<size_t>(stride));
  for (int64_t g = 0; g < n / stride; ++g) {
    for (int64_t h = 0; h < kv_heads; ++h) {
      const auto at = [&](int64_t j) { return ((g * stride + j) * kv_heads + h) * head_dim; };
      double top = -std::numeric_limits<double>::infinity();
      for (int64_t j = 0; j < stride; ++j) {
        double dot = 0;
        if (u != nullptr)
          for (int64_t c = 0; c < head_dim; ++c)
            dot += u[h * head_dim + c] * k[at(j) + c];
        weight[static_cast<size_t>(j)] = dot / std::sqrt(static_cast<double>(head_dim));
        top = std::max(top, weight[static_cast<size_t>(j)]);
      }
      double sum = 0;
      for (double& w : weight)
        sum += w = std::exp(w - top);
      for (int64_t c = 0; c < head_dim; ++c) {
        double k_sum = 0, v_sum = 0;
        for (int64_t j = 0; j < stride; ++j) {
          k_sum += weight[static_cast<size_t>(j)] * k[at(j) + c];
          v_sum += weight[static_cast<size_t>(j)] * v[at(j) + c];
        }
        kbar[(g * kv_heads + h) * head_dim + c] = k_sum / sum;
        vbar[(g * kv_heads + h) * head_dim + c] = v_sum / sum;
      }
    }
  }
}

}  // namespace longhalo

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

void landmark_pool_backward_reference(int64_t n, int64_t kv_heads, int64_t head_dim, int64_t stride,
                                      const double* u, const double* k, const double* v, const double* d_kbar,
                                      const double* d_vbar, double* dk, double* dv, double* d_u) {
  check(stride >= 1 && kv_heads >= 1 && head_dim >= 1, "landmark pooling has a positive stride and shape");
  const double root = std::sqrt(static_cast<double>(head_dim));
  std::vector<double> weight(static_cast<size_t>(stride)), gain(weight.size());
  for (int64_t g = 0; g < n / stride; ++g) {
    for (int64_t h = 0; h < kv_heads; ++h) {
      const auto at = [&](int64_t j) { return ((g * stride + j) * kv_heads + h) * head_dim; };
      const double* d_key = d_kbar + (g * kv_heads + h) * head_dim;
      const double* d_value = d_vbar + (g * kv_heads + h) * head_dim;
      double top = -std::numeric_limits<double>::infinity();
      for (int64_t j = 0; j < stride; ++j) {
        double score = 0, sum = 0;
        for (int64_t c = 0; c < head_dim; ++c) {
          if (u != nullptr) score += u[h * head_dim + c] * k[at(j) + c] / root;
          sum += d_key[c] * k[at(j) + c] + d_value[c] * v[at(j) + c];
        }
        weight[static_cast<size_t>(j)] = score;
        gain[static_cast<size_t>(j)] = sum;
        top = std::max(top, score);
      }
      double sum = 0, mean = 0;
      for (double& w : weight)
        sum += w = std::exp(w - top);
      for (size_t j = 0; j < weight.size(); ++j) {
        weight[j] /= sum;
        mean += weight[j] * gain[j];
      }
      for (int64_t j = 0; j < stride; ++j) {
        const double a = weight[static_cast<size_t>(j)], ds = a * (gain[static_cast<size_t>(j)] - mean);
        for (int64_t c = 0; c < head_dim; ++c) {
          dk[at(j) + c] += a * d_key[c] + (u != nullptr ? ds * u[h * head_dim + c] / root : 0);
          dv[at(j) + c] += a * d_value[c];
          if (d_u != nullptr) d_u[h * head_dim + c] += ds * k[at(j) + c] / root;
        }
      }
    }
  }
}

}  // namespace longhalo

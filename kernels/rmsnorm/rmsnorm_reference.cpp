#include <cmath>

#include "kernels/rmsnorm/rmsnorm.hpp"

namespace longhalo {

void rmsnorm_reference(int64_t n, int64_t hidden, const double* x, const double* weight, double epsilon,
                       double* out) {
  for (int64_t i = 0; i < n; ++i) {
    double squares = 0;
    for (int64_t c = 0; c < hidden; ++c)
      squares += x[i * hidden + c] * x[i * hidden + c];
    const double norm = std::sqrt(squares / static_cast<double>(hidden) + epsilon);
    for (int64_t c = 0; c < hidden; ++c)
      out[i * hidden + c] = x[i * hidden + c] / norm * weight[c];
  }
}

void rmsnorm_backward_reference(int64_t n, int64_t hidden, const double* x, const double* weight,
                                double epsilon, const double* d_out, double* dx, double* d_weight) {
  for (int64_t i = 0; i < n; ++i) {
    double squares = 0, products = 0;
    for (int64_t c = 0; c < hidden; ++c) {
      squares += x[i * hidden + c] * x[i * hidden + c];
      products += x[i * hidden + c] * weight[c] * d_out[i * hidden + c];
    }
    const double r = 1.0 / std::sqrt(squares / static_cast<double>(hidden) + epsilon);
    const double mean = products / static_cast<double>(hidden);
    for (int64_t c = 0; c < hidden; ++c) {
      const double in = x[i * hidden + c], up = d_out[i * hidden + c];
      dx[i * hidden + c] += r * (weight[c] * up - in * r * r * mean);
      d_weight[c] += in * r * up;
    }
  }
}

}  // namespace longhalo

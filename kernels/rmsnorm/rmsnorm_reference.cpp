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

}  // namespace longhalo

#include <algorithm>
#include <vector>

#include "core/error.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/rmsnorm/rmsnorm_simd.hpp"

namespace longhalo {
namespace {

// The gradient of the weight is a sum over all rows: up to kParts parts of the rows (by n alone), each a sum
// in double of fp32 sums over kRows rows, and the parts added in their order.
constexpr int64_t kParts = 64;
constexpr int64_t kRows = 32;

}  // namespace

void rmsnorm(int64_t n, int64_t hidden, const float* x, const float* weight, float epsilon, float* out) {
  check(n >= 0 && hidden >= 1, "RMSNorm has rows of at least one element");
  const RmsnormKernels& kernels = LONGHALO_SIMD(rmsnorm_kernels);
#pragma omp parallel for if (n > 1)
  for (int64_t i = 0; i < n; ++i)
    kernels.row(hidden, x + i * hidden, weight, epsilon, out + i * hidden);
}

void rmsnorm_backward(int64_t n, int64_t hidden, const float* x, const float* weight, float epsilon,
                      const float* d_out, float* dx, float* d_weight) {
  check(n >= 0 && hidden >= 1, "RMSNorm has rows of at least one element");
  if (n == 0) return;
  const RmsnormKernels& kernels = LONGHALO_SIMD(rmsnorm_kernels);
  const int64_t parts = std::min(kParts, (n + kRows - 1) / kRows);
  std::vector<double> sums(static_cast<size_t>(parts * hidden));
  std::vector<float> few(sums.size());  // sums over kRows rows
#pragma omp parallel for if (parts > 1)
  for (int64_t part = 0; part < parts; ++part) {
    double* sum = sums.data() + part * hidden;
    float* row_sum = few.data() + part * hidden;
    const int64_t end = (part + 1) * n / parts;
    for (int64_t first = part * n / parts; first < end; first += kRows) {
      std::fill_n(row_sum, hidden, 0.0F);
      for (int64_t i = first; i < std::min(first + kRows, end); ++i)
        kernels.gradient(hidden, x + i * hidden, weight, epsilon, d_out + i * hidden, dx + i * hidden,
                         row_sum);
      for (int64_t c = 0; c < hidden; ++c)
        sum[c] += static_cast<double>(row_sum[c]);
    }
  }
  for (int64_t c = 0; c < hidden; ++c) {
    double sum = 0;
    for (int64_t part = 0; part < parts; ++part)
      sum += sums[static_cast<size_t>(part * hidden + c)];
    d_weight[c] += static_cast<float>(sum);
  }
}

}  // namespace longhalo

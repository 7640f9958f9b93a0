#include "kernels/matmul/matmul.hpp"

namespace longhalo {

void matmul_reference(int64_t m, int64_t out, int64_t in, const double* a, const double* w, double* c,
                      Accumulate accumulate) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t o = 0; o < out; ++o) {
      double sum = accumulate == Accumulate::kAdd ? c[i * out + o] : 0;
      for (int64_t x = 0; x < in; ++x)
        sum += a[i * in + x] * w[o * in + x];
      c[i * out + o] = sum;
    }
  }
}

}  // namespace longhalo

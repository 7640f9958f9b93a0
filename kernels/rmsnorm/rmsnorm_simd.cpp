#include "kernels/rmsnorm/rmsnorm_simd.hpp"

#include "kernels/common/simd.hpp"

namespace longhalo::LONGHALO_ISA {
namespace {

// 1 / sqrt(mean(x^2) + epsilon)
LONGHALO_INLINE float inverse_norm(int64_t hidden, const float* x, float epsilon) {
  Float squares[4] = {};
  int64_t c = 0;
  for (; c + 4 * kLanes <= hidden; c += 4 * kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const Float part = load(x + c + v * kLanes);
      squares[v] += part * part;
    }
  }
  for (; c < hidden; c += kLanes) {
    const Float part = load_part(x + c, hidden - c);
    squares[0] += part * part;
  }
  const float mean =
      sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(hidden);
  return 1.0F / __builtin_sqrtf(mean + epsilon);
}

void row(int64_t hidden, const float* x, const float* weight, float epsilon, float* out) {
  const float factor = inverse_norm(hidden, x, epsilon);
  int64_t c = 0;
  for (; c + kLanes <= hidden; c += kLanes)
    store(out + c, load(x + c) * factor * load(weight + c));
  if (c < hidden)
    store_part(out + c, hidden - c,
               load_part(x + c, hidden - c) * factor * load_part(weight + c, hidden - c));
}

void gradient(int64_t hidden, const float* x, const float* weight, float epsilon, const float* d_out,
              float* dx, float* d_weight) {
  const float factor = inverse_norm(hidden, x, epsilon);
  Float products[4] = {};
  int64_t c = 0;
  for (; c + 4 * kLanes <= hidden; c += 4 * kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const int64_t at = c + v * kLanes;
      products[v] += load(x + at) * load(weight + at) * load(d_out + at);
    }
  }
  for (; c < hidden; c += kLanes)
    products[0] +=
        load_part(x + c, hidden - c) * load_part(weight + c, hidden - c) * load_part(d_out + c, hidden - c);
  const float mean =
      sum_lanes((products[0] + products[1]) + (products[2] + products[3])) / static_cast<float>(hidden);
  const float shrink = factor * factor * mean;
  for (c = 0; c + kLanes <= hidden; c += kLanes) {
    const Float in = load(x + c), up = load(d_out + c);
    store(dx + c, load(dx + c) + factor * (load(weight + c) * up - in * shrink));
    store(d_weight + c, load(d_weight + c) + in * factor * up);
  }
  for (; c < hidden; ++c) {
    dx[c] += factor * (weight[c] * d_out[c] - x[c] * shrink);
    d_weight[c] += x[c] * factor * d_out[c];
  }
}

}  // namespace

extern const RmsnormKernels rmsnorm_kernels{row, gradient};

}  // namespace longhalo::LONGHALO_ISA

#include "kernels/rmsnorm/rmsnorm_simd.hpp"

#include "kernels/common/simd.hpp"

namespace longhalo::LONGHALO_ISA {
namespace {

void row(int64_t hidden, const float* x, const float* weight, float epsilon, float* out) {
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
  const float factor = 1.0F / __builtin_sqrtf(mean + epsilon);
  for (c = 0; c + kLanes <= hidden; c += kLanes)
    store(out + c, load(x + c) * factor * load(weight + c));
  if (c < hidden)
    store_part(out + c, hidden - c,
               load_part(x + c, hidden - c) * factor * load_part(weight + c, hidden - c));
}

}  // namespace

extern const RmsnormKernels rmsnorm_kernels{row};

}  // namespace longhalo::LONGHALO_ISA

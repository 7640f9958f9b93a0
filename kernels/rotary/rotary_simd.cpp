#include "kernels/rotary/rotary_simd.hpp"

#include "kernels/common/simd.hpp"

namespace longhalo::LONGHALO_ISA {
namespace {

void row(int64_t heads, int64_t half, Turn anchor, Turn offset, float* __restrict table,
         float* __restrict x) {
  float* const cosine = table;
  float* const sine = table + half;
  for (int64_t c = 0; c < half; ++c) {
    cosine[c] = static_cast<float>(anchor.cosine[c] * offset.cosine[c] - anchor.sine[c] * offset.sine[c]);
    sine[c] = static_cast<float>(anchor.sine[c] * offset.cosine[c] + anchor.cosine[c] * offset.sine[c]);
  }
  for (int64_t h = 0; h < heads; ++h) {
    float* first = x + h * 2 * half;
    float* second = first + half;
    int64_t c = 0;
    for (; c + kLanes <= half; c += kLanes) {
      const Float a = load(first + c), b = load(second + c), co = load(cosine + c), si = load(sine + c);
      store(first + c, a * co - b * si);
      store(second + c, b * co + a * si);
    }
    for (; c < half; ++c) {
      const float a = first[c], b = second[c];
      first[c] = a * cosine[c] - b * sine[c];
      second[c] = b * cosine[c] + a * sine[c];
    }
  }
}

}  // namespace

extern const RotaryKernels rotary_kernels{row};

}  // namespace longhalo::LONGHALO_ISA

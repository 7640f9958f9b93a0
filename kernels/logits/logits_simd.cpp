#include "kernels/logits/logits_simd.hpp"

#include "kernels/common/simd.hpp"

namespace longhalo::LONGHALO_ISA {
namespace {

float largest(int64_t count, const float* x) {
  Float top = splat(-__builtin_inff());
  Int nan{};
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    const Float part = load(x + c);
    top = max(top, part);
    nan |= is_nan(part);
  }
  float best = max_lanes(top);
  bool found_nan = any(nan);
  for (; c < count; ++c) {
    best = x[c] > best ? x[c] : best;
    found_nan |= __builtin_isnan(x[c]) != 0;
  }
  return found_nan ? __builtin_nanf("") : best;
}

double sum_exp(int64_t count, const float* x, float top) {
  constexpr int64_t kBlock = 16 * kLanes;  // fp32 sums of 16 terms a lane, then on in double
  double sum = 0;
  int64_t c = 0;
  for (; c + kBlock <= count; c += kBlock) {
    Float part{};
    for (int64_t v = 0; v < kBlock; v += kLanes)
      part += exp_lanes(load(x + c + v) - top);
    for (int i = 0; i < kLanes; ++i)
      sum += static_cast<double>(part[i]);
  }
  for (; c < count; c += kLanes) {
    const Float part = exp_lanes(load_part(x + c, count - c) - top);
    for (int64_t i = 0; i < kLanes && c + i < count; ++i)
      sum += static_cast<double>(part[i]);
  }
  return sum;
}

void scaled_exp(int64_t count, float top, float factor, float* x) {
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes)
    store(x + c, exp_lanes(load(x + c) - top) * factor);
  if (c < count) store_part(x + c, count - c, exp_lanes(load_part(x + c, count - c) - top) * factor);
}

}  // namespace

extern const LogitsKernels logits_kernels{largest, sum_exp, scaled_exp};

}  // namespace longhalo::LONGHALO_ISA

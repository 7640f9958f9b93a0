// The running softmax of the Hopper attention kernel, on scores as wgmma leaves them in registers: each
// thread holds 32 columns of two rows (16 of half a tile), and four neighbouring threads share a row. Scores
// are in units of log2.
#pragma once

#include <cmath>

#include "kernels/common/mma.cuh"

namespace longhalo::hopper_attention {

// How far, in log2, a row's maximum may be from what its scores are relative to when that is chosen. Later
// weights may grow until those of a row in one thread add up to 2^64. fp32 and bf16 reach further on both
// sides, so that nothing is lost.
inline constexpr float kLag = 32;

// The running softmax of one thread's two rows, `rows[0]` and `rows[1]` = rows[0] + 8 of the warpgroup's 64.
struct Softmax {
  float top[2];  // what scores are relative to, in log2: 0 where that will do; equal in the four threads of a
                 // row
  float sum[2];  // of this thread's columns
  // How much larger the whole row's sum is when weights of the item's first tiles are rounded, those of the
  // nearest keys, which may be all that a row sees: a query that sees one key then gets its value exactly.
  float rounding[2];
  __device__ void reset() {
    top[0] = top[1] = -INFINITY;
    sum[0] = sum[1] = 0;
    rounding[0] = rounding[1] = 0;
  }
  /// Of every row of this warp.
  __device__ bool tops_are_zero() const { return __all_sync(0xffffffff, top[0] == 0 && top[1] == 0); }
};

// Raises the maxima to what the scores ask for. `rescale` gets what earlier sums and outputs must be
// multiplied with; returns whether that is needed by any row of this warp.
template <int kRegisters>
__device__ bool raise_maxima(const float (&s)[kRegisters], Softmax& softmax, float scale, float bias,
                             float (&rescale)[2]) {
  bool grown = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      most[i] = s[4 * i + 2 * half];
#pragma unroll
    for (int i = 0; i < kRegisters / 4; ++i) {
      if (i >= 4) most[i % 4] = fmaxf(most[i % 4], s[4 * i + 2 * half]);
      most[i % 4] = fmaxf(most[i % 4], s[4 * i + 2 * half + 1]);
    }
    float top = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
    top = fmaf(top, scale, bias);
    rescale[half] = 1;
    if (top > softmax.top[half] + kLag) {
      if (softmax.top[half] == -INFINITY && top > -kLag && top < kLag) top = 0;
      rescale[half] = exp2_fast(softmax.top[half] - top);
      softmax.top[half] = top;
      softmax.sum[half] *= rescale[half];
      softmax.rounding[half] *= rescale[half];
      grown = true;
    }
  }
  return __any_sync(0xffffffff, grown);
}

inline __device__ float sum_of_row(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Rows' sums of weights as the product with V takes them, by a product with ones. Pairs are packed in the
// other order than for that one: the compiler must not keep these for it, whose registers are not free yet.
template <int kRegisters>
__device__ void sum_rounded(const float (&s)[kRegisters], float (&sums)[2]) {
  constexpr uint32_t kOnes = 0x3f803f80;
  float total[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kRegisters; i += 8) {
    const uint32_t a[4] = {pack_bf16(s[i + 1], s[i]), pack_bf16(s[i + 3], s[i + 2]),
                           pack_bf16(s[i + 5], s[i + 4]), pack_bf16(s[i + 7], s[i + 6])};
    multiply_add(total, a, kOnes, kOnes, total);
  }
  sums[0] = total[0], sums[1] = total[2];
}

// What scores are taken relative to.
enum class Relative {
  kToNothing,  // every row's `top` is 0, and scores come as exponents: the scale is 1, the bias 0
  kToTop,      // every row has one
  kToRaised,   // just after raise_maxima: a row without one sees no key
};

// Scores to weights in place, and into the sums. False, with nothing but `s` changed, when a weight became
// too large, or a row has no maximum yet; never right after raise_maxima: a row of NaN must not keep the sums
// of its neighbours from growing. With `kRounds` also into `rounding`.
template <Relative kRelative, bool kRounds, int kRegisters>
__device__ bool soften(float (&s)[kRegisters], Softmax& softmax, float scale, float bias) {
  float total[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool no_top = kRelative == Relative::kToRaised && softmax.top[half] == -INFINITY;
    const float offset = bias - (no_top ? 0.0F : softmax.top[half]);
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kRegisters / 4; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[4 * i + 2 * half + c];
        x = exp2_fast(kRelative == Relative::kToNothing ? x : fmaf(x, scale, offset));
        sum[c] += x;
      }
    }
    total[half] = sum[0] + sum[1];
  }
  constexpr float kLargest = 0x1p64F;
  const bool fine = __all_sync(0xffffffff, total[0] < kLargest && total[1] < kLargest);
  if (!fine && kRelative != Relative::kToRaised) return false;
  if constexpr (kRounds) {
    float rounded[2];
    sum_rounded(s, rounded);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      softmax.rounding[half] += rounded[half] - sum_of_row(total[half]);
  }
  softmax.sum[0] += total[0];
  softmax.sum[1] += total[1];
  return true;
}

// Of the 16 keys that a thread has of 64 those before key `end`, a bit each.
inline __device__ unsigned keys_before(int end, int lane) {
  const int own = min(max(end - 2 * (lane % 4), 0), 64);
  return (1U << (own / 8 * 2 + min(own % 8, 2))) - 1;
}

// Scores of keys that a row does not see become -infinity, in registers [kFrom, kFrom + 32): 64 keys, of
// which the thread's two rows see [begin, end).
template <int kFrom, int kRegisters>
__device__ void mask_scores(float (&s)[kRegisters], const int (&begin)[2], const int (&end)[2], int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned seen = keys_before(end[half], lane) & ~keys_before(begin[half], lane);
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (!(seen & 1U << (2 * i + c))) s[kFrom + 4 * i + 2 * half + c] = -INFINITY;
  }
}

}  // namespace longhalo::hopper_attention

// Cross-entropy of a tile of logits: one block a row, which is read for its largest logit and the sum of
// exponentials at once, and again for its gradient.
#include <cmath>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/bf16_vector.cuh"
#include "kernels/cross_entropy/cross_entropy.hpp"

namespace longhalo {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kAhead = 2;  // groups of eight logits on their way at once
constexpr unsigned kWholeWarp = 0xffffffffU;

struct Rows {
  int64_t vocabulary, stride;
  const float* logits;
  const int32_t* labels;
  float z_loss, scale;
  BFloat16* d_logits;
  float2* losses;  // [n] of each row, weighted z-loss second
};

// A running sum of exponentials, relative to the largest so far.
struct ExpSum {
  float top, sum;
};

// NaN and +infinity must not be lost: a row that holds one has a sum that is not finite.
__device__ ExpSum join(ExpSum a, ExpSum b) {
  const float top = fmaxf(a.top, b.top);
  const float from_a = a.top == top ? a.sum : a.sum * __expf(a.top - top);
  const float from_b = b.top == top ? b.sum : b.sum * __expf(b.top - top);
  return {top, from_a + from_b};
}

// Eight logits from column `at` on; -infinity behind the last. Rows begin at any multiple of four bytes.
template <bool kAligned>
__device__ void load_logits(const float* row, int64_t at, int64_t vocabulary, float (&to)[8]) {
  if (kAligned && at + 8 <= vocabulary) {
    load_vector(row + at, to);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    to[i] = at + i < vocabulary ? row[at + i] : -INFINITY;
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) loss_rows(Rows p) {
  __shared__ ExpSum warps[kWarps];
  const int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t label = p.labels[row];
  BFloat16* const d_row = p.d_logits == nullptr ? nullptr : p.d_logits + row * p.stride;
  if (label == kIgnoredLabel) {
    if (thread == 0) p.losses[row] = make_float2(0, 0);
    const float zero[8] = {};
    for (int64_t at = int64_t{8} * thread; d_row != nullptr && at < p.stride; at += int64_t{8} * kThreads)
      store_vector(d_row + at, pack(zero));
    return;
  }
  const float* const logits = p.logits + row * p.vocabulary;
  ExpSum mine{-INFINITY, 0};
  for (int64_t base = int64_t{8} * thread; base < p.vocabulary; base += int64_t{8} * kThreads * kAhead) {
    float x[kAhead][8];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      load_logits<kAligned>(logits, base + int64_t{8} * kThreads * i, p.vocabulary, x[i]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      float top = x[i][0];
#pragma unroll
      for (int c = 1; c < 8; ++c)
        top = fmaxf(top, x[i][c]);
      const float shift = top == -INFINITY ? 0 : top;  // nothing but -infinity: a sum of 0
      float sum = 0;
#pragma unroll
      for (int c = 0; c < 8; ++c)
        sum += __expf(x[i][c] - shift);
      mine = join(mine, {top, sum});
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    mine = join(mine,
                {__shfl_xor_sync(kWholeWarp, mine.top, lanes), __shfl_xor_sync(kWholeWarp, mine.sum, lanes)});
  if (thread % 32 == 0) warps[thread / 32] = mine;
  __syncthreads();
  ExpSum all = warps[0];
  for (int warp = 1; warp < kWarps; ++warp)
    all = join(all, warps[warp]);
  const float log_sum = logf(all.sum), lse = all.top + log_sum;
  if (thread == 0) {
    // The largest logit, which both have in common, cancels first.
    const float loss = (all.top - logits[label]) + log_sum;
    p.losses[row] = make_float2(loss, p.z_loss * lse * lse);
  }
  if (d_row == nullptr) return;
  const float weight = p.scale * fmaf(2 * p.z_loss, lse, 1.0F);
  for (int64_t base = int64_t{8} * thread; base < p.stride; base += int64_t{8} * kThreads * kAhead) {
    float x[kAhead][8];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      load_logits<kAligned>(logits, base + int64_t{8} * kThreads * i, p.vocabulary, x[i]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = base + int64_t{8} * kThreads * i;
      if (at >= p.stride) continue;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        x[i][c] = weight * __expf(x[i][c] - lse);  // 0 behind the last
        if (at + c == label) x[i][c] -= p.scale;
      }
      store_vector(d_row + at, pack(x[i]));
    }
  }
}

constexpr int kSumThreads = 256;

// One block; thread t adds rows t, t + 256, ..., and then pairs of threads.
__global__ void __launch_bounds__(kSumThreads)
    sum_losses(int64_t n, const float2* losses, DeviceLossSums* to) {
  __shared__ double loss[kSumThreads], z_loss[kSumThreads];
  const int thread = static_cast<int>(threadIdx.x);
  double one = 0, other = 0;
  for (int64_t row = thread; row < n; row += kSumThreads)
    one += static_cast<double>(losses[row].x), other += static_cast<double>(losses[row].y);
  loss[thread] = one, z_loss[thread] = other;
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) loss[thread] += loss[thread + half], z_loss[thread] += z_loss[thread + half];
  }
  if (thread == 0) to->loss += loss[0], to->z_loss += z_loss[0];
}

}  // namespace

void cross_entropy_rows(StreamHandle stream, int64_t n, int64_t vocabulary, const float* logits,
                        const int32_t* labels, float z_loss, float scale, BFloat16* d_logits, int64_t stride,
                        DeviceLossSums* sums, void* workspace) {
  check(n >= 0 && n <= INT32_MAX && vocabulary >= 1, "cross-entropy has a positive shape");
  check(d_logits == nullptr || (stride >= vocabulary && stride % kVectorWidth == 0),
        "rows of the gradient of logits are 16-byte aligned and do not overlap");
  if (n == 0) return;
  const NvtxRange range("cross-entropy");
  const Rows p{vocabulary, stride, logits, labels, z_loss, scale, d_logits, static_cast<float2*>(workspace)};
  const bool aligned = vocabulary % 4 == 0 && reinterpret_cast<uintptr_t>(logits) % 16 == 0;
  const auto kernel = aligned ? loss_rows<true> : loss_rows<false>;
  kernel<<<static_cast<unsigned>(n), kThreads, 0, stream>>>(p);
  check_launch("cross-entropy", stream);
  sum_losses<<<1, kSumThreads, 0, stream>>>(n, p.losses, sums);
  check_launch("sums of losses", stream);
}

}  // namespace longhalo

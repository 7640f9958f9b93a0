#include <cfloat>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/logits/logits.hpp"

namespace longhalo {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// Calls visit(index, value) for this thread's part of x [count]: single numbers up to the first 16-byte
// boundary (rows of an odd vocabulary begin anywhere), four vectors at a time between, single numbers at the
// end.
template <class Visit>
__device__ void for_each_logit(int64_t count, const float* x, Visit visit) {
  constexpr int kUnroll = 4;
  const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(float));
  const int64_t head = min((4 - misaligned) % 4, count);
  const int64_t vectors = (count - head) / 4;
  const int64_t tail = head + vectors * 4;
  const auto thread = static_cast<int64_t>(threadIdx.x);
  if (thread < head) visit(thread, x[thread]);
  const auto* body = reinterpret_cast<const float4*>(x + head);
  for (int64_t at = thread; at < vectors; at += kUnroll * kThreads) {
    float4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (at + u * kThreads < vectors) v[u] = body[at + u * kThreads];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * kThreads >= vectors) continue;
      const int64_t index = head + (at + u * kThreads) * 4;
      visit(index, v[u].x), visit(index + 1, v[u].y), visit(index + 2, v[u].z), visit(index + 3, v[u].w);
    }
  }
  if (tail + thread < count) visit(tail + thread, x[tail + thread]);
}

// sum of exp(x - top) seen so far. `top` starts at the lowest finite number, so that logits of -infinity add
// 0 instead of making NaN.
struct ExpSum {
  float top = -FLT_MAX;
  float sum = 0;

  __device__ void add(float x) {
    if (x > top) {
      sum *= __expf(top - x);
      top = x;
    }
    sum += __expf(x - top);
  }
  __device__ void merge(float other_top, float other_sum) {
    const float higher = fmaxf(top, other_top);
    sum = sum * __expf(top - higher) + other_sum * __expf(other_top - higher);
    top = higher;
  }
};

__device__ ExpSum merge_warp(ExpSum mine) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const float top = __shfl_down_sync(0xffffffffU, mine.top, lanes);
    const float sum = __shfl_down_sync(0xffffffffU, mine.sum, lanes);
    mine.merge(top, sum);
  }
  return mine;  // right in lane 0
}

__global__ void __launch_bounds__(kThreads)
    label_log_probability(int64_t vocabulary, const float* __restrict__ logits,
                          const int32_t* __restrict__ labels, float* out) {
  __shared__ float tops[kWarps], sums[kWarps];
  const int64_t row = blockIdx.x;
  const float* x = logits + row * vocabulary;
  ExpSum mine;
  for_each_logit(vocabulary, x, [&](int64_t, float value) { mine.add(value); });
  mine = merge_warp(mine);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (lane == 0) tops[warp] = mine.top, sums[warp] = mine.sum;
  __syncthreads();
  if (warp > 0) return;
  mine.top = tops[lane], mine.sum = sums[lane];
  mine = merge_warp(mine);
  if (lane > 0) return;
  const double above = static_cast<double>(x[labels[row]]) - static_cast<double>(mine.top);
  out[row] = static_cast<float>(above - log(static_cast<double>(mine.sum)));
}

struct Largest {
  float value;
  int32_t index;

  __device__ void take(float other, int32_t at) {
    if (other > value || (other == value && at < index)) value = other, index = at;
  }
};

__device__ Largest largest_of_warp(Largest mine) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const float value = __shfl_down_sync(0xffffffffU, mine.value, lanes);
    const int32_t index = __shfl_down_sync(0xffffffffU, mine.index, lanes);
    mine.take(value, index);
  }
  return mine;  // right in lane 0
}

__global__ void __launch_bounds__(kThreads)
    argmax_block(int64_t vocabulary, const float* __restrict__ logits, int32_t* index) {
  __shared__ float values[kWarps];
  __shared__ int32_t indices[kWarps];
  Largest mine{-INFINITY, INT32_MAX};
  bool nan = false;
  for_each_logit(vocabulary, logits, [&](int64_t at, float value) {
    nan = nan || isnan(value);
    mine.take(value, static_cast<int32_t>(at));
  });
  mine = largest_of_warp(mine);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (lane == 0) values[warp] = mine.value, indices[warp] = mine.index;
  const bool any_nan = __syncthreads_or(nan) != 0;
  if (warp > 0) return;
  mine = largest_of_warp({values[lane], indices[lane]});
  if (lane == 0) *index = any_nan ? -1 : mine.index;
}

}  // namespace

void label_log_probabilities(StreamHandle stream, int64_t n, int64_t vocabulary, const float* logits,
                             const int32_t* labels, float* out) {
  if (n == 0) return;
  check(n > 0 && n <= INT32_MAX && vocabulary > 0, "log-probabilities have rows of logits");
  const NvtxRange range("label log-probabilities");
  label_log_probability<<<static_cast<unsigned>(n), kThreads, 0, stream>>>(vocabulary, logits, labels, out);
  check_launch("label log-probabilities", stream);
}

void argmax(StreamHandle stream, int64_t vocabulary, const float* logits, int32_t* index) {
  check(vocabulary > 0 && vocabulary <= INT32_MAX, "argmax has logits");
  const NvtxRange range("argmax");
  argmax_block<<<1, kThreads, 0, stream>>>(vocabulary, logits, index);
  check_launch("argmax", stream);
}

}  // namespace longhalo

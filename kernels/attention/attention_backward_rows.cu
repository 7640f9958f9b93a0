// What comes before and after the kernels of attention's gradient: for each row lse in units of log2 and
// D = out . d_out, and the sums of partial results in a fixed order.
#include <numbers>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "kernels/attention/attention_cuda.hpp"
#include "kernels/common/bf16_vector.cuh"

namespace longhalo {
namespace {

constexpr int kRowTile = 64;  // rows of one head that a block works on
constexpr int kRowThreads = 256;
constexpr unsigned kWholeWarp = 0xffffffffU;

// kDim / 8 threads share a row, 16 bytes of each array a thread.
template <int kDim>
__global__ void __launch_bounds__(kRowThreads)
    rows_kernel(int64_t n, int64_t padded, int64_t heads, const BFloat16* out, const BFloat16* d_out,
                const float* lse, float* lse_log2, float* delta) {
  constexpr int kThreadsOfRow = kDim / kVectorWidth, kStep = kRowThreads / kThreadsOfRow;
  const int64_t head = blockIdx.x % heads, first = blockIdx.x / heads * kRowTile;
  const int part = static_cast<int>(threadIdx.x) % kThreadsOfRow;
#pragma unroll
  for (int r = static_cast<int>(threadIdx.x) / kThreadsOfRow; r < kRowTile; r += kStep) {
    const int64_t row = first + r;
    float sum = 0, log2_sum = INFINITY;
    if (row < n) {
      const float ln_sum = lse[head * n + row];
      if (ln_sum != -INFINITY) {
        const int64_t at = (row * heads + head) * kDim + part * kVectorWidth;
        float a[8], b[8];
        unpack(load_vector(out + at), a);
        unpack(load_vector(d_out + at), b);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          sum = fmaf(a[i], b[i], sum);
        log2_sum = ln_sum * std::numbers::log2e_v<float>;
      }
    }
#pragma unroll
    for (int lanes = kThreadsOfRow / 2; lanes > 0; lanes /= 2)
      sum += __shfl_xor_sync(kWholeWarp, sum, lanes);
    if (part == 0) lse_log2[head * padded + row] = log2_sum, delta[head * padded + row] = sum;
  }
}

constexpr int kSumThreads = 256;

// One block a head; thread t adds up tiles t, t + 256, ..., and then pairs of threads.
__global__ void __launch_bounds__(kSumThreads)
    bias_kernel(const float* partial, int64_t tiles, int64_t heads, float* to) {
  __shared__ double sums[kSumThreads];
  const int thread = static_cast<int>(threadIdx.x);
  double sum = 0;
  for (int64_t tile = thread; tile < tiles; tile += kSumThreads)
    sum += static_cast<double>(partial[tile * heads + blockIdx.x]);
  sums[thread] = sum;
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (thread == 0) to[blockIdx.x] += static_cast<float>(sums[0]);
}

// Block row 0 adds to dk, 1 to dv; a thread has four numbers of a row.
__global__ void __launch_bounds__(kSumThreads) keys_kernel(KeyPartials p) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x) * 4;
  const int64_t one = p.count * p.width;  // of keys, or of values
  if (at >= one) return;
  const float* from = p.partial + blockIdx.y * one + at;
  float4 sum = *reinterpret_cast<const float4*>(from);
  for (int64_t chunk = 1; chunk < p.chunks; ++chunk) {
    from += 2 * one;
    const float4 x = *reinterpret_cast<const float4*>(from);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  float4* const to =
      reinterpret_cast<float4*>((blockIdx.y == 0 ? p.dk : p.dv) + at / p.width * p.row_stride + at % p.width);
  const float4 old = *to;
  *to = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
}

}  // namespace

void attention_backward_rows(StreamHandle stream, const AttentionGradient<BFloat16>& gradient,
                             float* lse_log2, float* delta) {
  const Attention<BFloat16>& p = gradient.forward;
  const int64_t padded = attention_backward_padded(p.queries), blocks = padded / kRowTile * p.heads;
  check(blocks <= INT32_MAX, "a grid of rows has less than 2^31 blocks");
  const auto kernel = p.head_dim == 128 ? rows_kernel<128> : rows_kernel<64>;
  kernel<<<static_cast<unsigned>(blocks), kRowThreads, 0, stream>>>(p.queries, padded, p.heads, p.out,
                                                                    gradient.d_out, p.lse, lse_log2, delta);
  check_launch("attention's gradient: lse and D of rows", stream);
}

void add_bias_partials(StreamHandle stream, const float* partial, int64_t tiles, int64_t heads, float* to) {
  bias_kernel<<<static_cast<unsigned>(heads), kSumThreads, 0, stream>>>(partial, tiles, heads, to);
  check_launch("attention's gradient: sums of the landmark bias", stream);
}

void add_key_partials(StreamHandle stream, const KeyPartials& partials) {
  const int64_t blocks = (partials.count * partials.width / 4 + kSumThreads - 1) / kSumThreads;
  check(blocks <= INT32_MAX, "a grid of keys has less than 2^31 blocks");
  keys_kernel<<<dim3(static_cast<unsigned>(blocks), 2), kSumThreads, 0, stream>>>(partials);
  check_launch("attention's gradient: sums of keys and values", stream);
}

}  // namespace longhalo

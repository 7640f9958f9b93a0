// The gradient of RMSNorm. As many blocks as keep the GPU busy walk over the rows; each thread keeps its
// columns' sums of the weight's gradient in registers, and the blocks' sums are added in order afterwards.
#include <algorithm>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/add_parts.hpp"
#include "kernels/common/bf16_vector.cuh"
#include "kernels/rmsnorm/rmsnorm.hpp"

namespace longhalo {
namespace {

constexpr int kVectors = 4;         // of a row, that a thread holds
constexpr int kLeastThreads = 128;  // of a block: four narrow rows, or one
constexpr int kMaxThreads = 512;
constexpr int64_t kMaxParts = 1024;  // rows being worked on at once
constexpr unsigned kWholeWarp = 0xffffffffU;

struct NormGradient {
  int64_t n, hidden;
  int vectors, row_threads;
  const BFloat16* x;
  const float* weight;
  float epsilon;
  const BFloat16* d_out;
  BFloat16* dx;
  float* partial;  // [parts, hidden]
};

// How rows are dealt out; by the shape alone, so that sums have the same order on every GPU.
struct Deal {
  int row_threads, rows_a_block;
  int64_t blocks, parts;
};

Deal deal(int64_t n, int64_t hidden) {
  check(n >= 0 && hidden > 0 && hidden % kVectorWidth == 0 && hidden <= kMaxThreads * kVectors * kVectorWidth,
        "the gradient of a norm takes widths that are multiples of 8 up to 16384");
  const int64_t vectors = hidden / kVectorWidth;
  const int threads = static_cast<int>((vectors + 32 * kVectors - 1) / (32 * kVectors)) * 32;
  const int rows = threads == 32 ? kLeastThreads / 32 : 1;
  const int64_t blocks = std::min(kMaxParts / rows, (n + rows - 1) / rows);
  return {threads, rows, blocks, blocks * rows};
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) norm_gradient_kernel(NormGradient p) {
  __shared__ float sums[2][2][kThreads / 32];  // by turns: squares, products of each warp
  const int rows = static_cast<int>(blockDim.x) / p.row_threads, warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % p.row_threads;
  const int64_t part = static_cast<int64_t>(blockIdx.x) * rows + threadIdx.x / p.row_threads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * rows;
  float d_weight[kVectors][8] = {};
  int turn = 0;
  for (int64_t row = part; row < p.n; row += step, turn = 1 - turn) {
    Bf16x8 x[kVectors], d_out[kVectors], dx[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = lane + i * p.row_threads;
      if (at >= p.vectors) continue;
      const int64_t from = row * p.hidden + at * kVectorWidth;
      x[i] = load_vector(p.x + from), d_out[i] = load_vector(p.d_out + from),
      dx[i] = load_vector(p.dx + from);
    }
    float squares = 0, products = 0;  // of x, and of x weight d_out
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = lane + i * p.row_threads;
      if (at >= p.vectors) continue;
      float a[8], b[8], w[8];
      unpack(x[i], a);
      unpack(d_out[i], b);
      load_vector(p.weight + at * kVectorWidth, w);
#pragma unroll
      for (int c = 0; c < 8; ++c)
        squares = fmaf(a[c], a[c], squares), products = fmaf(a[c] * w[c], b[c], products);
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      squares += __shfl_xor_sync(kWholeWarp, squares, lanes);
      products += __shfl_xor_sync(kWholeWarp, products, lanes);
    }
    if (p.row_threads > 32) {
      // What was written two turns ago has been read by all, for they have passed the barrier of the last.
      if (lane % 32 == 0) sums[turn][0][warp] = squares, sums[turn][1][warp] = products;
      __syncthreads();
      squares = products = 0;
      for (int other = 0; other < p.row_threads / 32; ++other)
        squares += sums[turn][0][other], products += sums[turn][1][other];
    }
    const float r = rsqrtf(squares / static_cast<float>(p.hidden) + p.epsilon);
    const float along = r * r * products / static_cast<float>(p.hidden);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = lane + i * p.row_threads;
      if (at >= p.vectors) continue;
      float a[8], b[8], w[8], d[8];
      unpack(x[i], a);
      unpack(d_out[i], b);
      unpack(dx[i], d);
      load_vector(p.weight + at * kVectorWidth, w);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        d[c] = fmaf(r, fmaf(w[c], b[c], -along * a[c]), d[c]);
        d_weight[i][c] = fmaf(a[c] * r, b[c], d_weight[i][c]);
      }
      store_vector(p.dx + row * p.hidden + at * kVectorWidth, pack(d));
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = lane + i * p.row_threads;
    if (at >= p.vectors) continue;
    float4* const to = reinterpret_cast<float4*>(p.partial + part * p.hidden + at * kVectorWidth);
    to[0] = make_float4(d_weight[i][0], d_weight[i][1], d_weight[i][2], d_weight[i][3]);
    to[1] = make_float4(d_weight[i][4], d_weight[i][5], d_weight[i][6], d_weight[i][7]);
  }
}

}  // namespace

int64_t rmsnorm_backward_workspace(int64_t n, int64_t hidden) {
  return deal(n, hidden).parts * hidden * int64_t{sizeof(float)};
}

void rmsnorm_backward(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, const float* weight,
                      float epsilon, const BFloat16* d_out, BFloat16* dx, float* d_weight, void* workspace) {
  const Deal rows = deal(n, hidden);
  if (n == 0) return;
  const NvtxRange range("rmsnorm's gradient");
  const NormGradient p{
      n,     hidden, static_cast<int>(hidden / kVectorWidth), rows.row_threads, x, weight, epsilon,
      d_out, dx,     static_cast<float*>(workspace)};
  const int threads = rows.row_threads * rows.rows_a_block;
  const auto kernel = threads <= 128   ? norm_gradient_kernel<128>
                      : threads <= 256 ? norm_gradient_kernel<256>
                                       : norm_gradient_kernel<512>;
  kernel<<<static_cast<unsigned>(rows.blocks), threads, 0, stream>>>(p);
  check_launch("rmsnorm's gradient", stream);
  add_parts(stream, p.partial, rows.parts, hidden, d_weight);
}

}  // namespace longhalo

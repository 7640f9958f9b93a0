#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/chunk_sums/chunk_sums.hpp"
#include "kernels/common/rows.cuh"

namespace longhalo {
namespace {

constexpr int kColumns = 16;  // vectors of a row that a block takes: 256 bytes side by side
constexpr int kLanes = 16;    // rows that a block reads at once

// One block owns (chunk, 128 columns), so nothing is added by two blocks; within it, lane y takes every 16th
// row and the lanes' sums are added in order.
__global__ void __launch_bounds__(kColumns* kLanes)
    chunk_sum_columns(int64_t n, int64_t hidden, const BFloat16* __restrict__ x, int64_t first_token,
                      int64_t chunk_tokens, int64_t first_chunk, double* sums) {
  __shared__ double parts[kLanes][kColumns * kVectorWidth];
  const int64_t chunk = first_chunk + blockIdx.x;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kColumns + threadIdx.x) * kVectorWidth;
  const int64_t begin = max(chunk * chunk_tokens - first_token, int64_t{0});
  const int64_t end = min((chunk + 1) * chunk_tokens - first_token, n);
  double mine[kVectorWidth] = {};
  if (column < hidden) {
#pragma unroll 4
    for (int64_t row = begin + threadIdx.y; row < end; row += kLanes) {
      float v[kVectorWidth];
      unpack(load_vector(x + row * hidden + column), v);
#pragma unroll
      for (int i = 0; i < kVectorWidth; ++i)
        mine[i] += static_cast<double>(v[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kVectorWidth; ++i)
    parts[threadIdx.y][threadIdx.x * kVectorWidth + i] = mine[i];
  __syncthreads();
  const int own = static_cast<int>(threadIdx.y) * kColumns + static_cast<int>(threadIdx.x);
  const int64_t own_column = static_cast<int64_t>(blockIdx.y) * kColumns * kVectorWidth + own;
  if (own >= kColumns * kVectorWidth || own_column >= hidden) return;
  double sum = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    sum += parts[lane][own];
  sums[chunk * hidden + own_column] += sum;
}

}  // namespace

void add_chunk_sums(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, int64_t first_token,
                    int64_t chunk_tokens, double* sums) {
  if (n == 0) return;
  check(n > 0 && first_token >= 0 && chunk_tokens > 0,
        "chunk sums have rows, from a token on, and a chunk size");
  check(hidden > 0 && hidden % kVectorWidth == 0, "the width of a row is a positive multiple of 8");
  check_aligned(x);
  const NvtxRange range("chunk sums");
  // A chunk size beyond all tokens would overflow when it is multiplied; one chunk is one chunk.
  chunk_tokens = std::min(chunk_tokens, first_token + n);
  const int64_t first_chunk = first_token / chunk_tokens;
  const int64_t chunks = (first_token + n - 1) / chunk_tokens - first_chunk + 1;
  const int64_t columns = (hidden + kColumns * kVectorWidth - 1) / (kColumns * kVectorWidth);
  check(chunks <= std::numeric_limits<int32_t>::max() && columns <= 65535,
        "the chunks of one call fit one grid");
  const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(columns)), block(kColumns, kLanes);
  chunk_sum_columns<<<grid, block, 0, stream>>>(n, hidden, x, first_token, chunk_tokens, first_chunk, sums);
  check_launch("chunk sums", stream);
}

}  // namespace longhalo

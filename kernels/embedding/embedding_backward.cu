// The gradient of the embedding table. Rows are put in the order of their tokens (a stable radix sort), so
// that each token's rows are a run. Blocks sum stretches of 256 sorted rows: a run that begins in a stretch
// is its block's to add to the table, and what it has in later stretches comes to it as parts, in order.
#include <cub/device/device_radix_sort.cuh>

#include <algorithm>
#include <bit>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/bf16_vector.cuh"
#include "kernels/embedding/embedding.hpp"

namespace longhalo {
namespace {

constexpr int kThreads = 256;
constexpr int kStretch = 256;   // sorted rows of a block
constexpr int kAhead = 4;       // rows on their way at once
constexpr int kColumns = 1024;  // of a block: 8 for each of 128 threads
constexpr int kSumThreads = kColumns / kVectorWidth;

__global__ void __launch_bounds__(kThreads) number_rows(int n, int32_t* rows) {
  const int at = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (at < n) rows[at] = at;
}

struct Sorted {
  int n;
  int64_t hidden;
  const int32_t *tokens, *rows;  // in the order of tokens
  const BFloat16* dx;
  float* d_table;
  float* first;  // [stretches, D]: what a stretch has of a run that began before it
};

__device__ void add_to(float* to, const float (&sum)[8]) {
  auto* const quads = reinterpret_cast<float4*>(to);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float4 old = quads[half];
    old.x += sum[4 * half], old.y += sum[4 * half + 1], old.z += sum[4 * half + 2],
        old.w += sum[4 * half + 3];
    quads[half] = old;
  }
}

__global__ void __launch_bounds__(kSumThreads) sum_stretches(Sorted p) {
  __shared__ int32_t tokens[kStretch], rows[kStretch];
  const int begin = static_cast<int>(blockIdx.x) * kStretch, count = min(kStretch, p.n - begin);
  for (int at = static_cast<int>(threadIdx.x); at < count; at += kSumThreads)
    tokens[at] = p.tokens[begin + at], rows[at] = p.rows[begin + at];
  __syncthreads();
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kColumns + threadIdx.x * kVectorWidth;
  if (column >= p.hidden) return;
  bool goes_on = begin > 0 && p.tokens[begin - 1] == tokens[0];  // the run at hand began before
  float sum[8] = {};
  for (int base = 0; base < count; base += kAhead) {
    Bf16x8 raw[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (base + i < count) raw[i] = load_vector(p.dx + rows[base + i] * p.hidden + column);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = base + i;
      if (at >= count) break;
      float x[8];
      unpack(raw[i], x);
#pragma unroll
      for (int c = 0; c < 8; ++c)
        sum[c] += x[c];
      if (at + 1 < count && tokens[at + 1] == tokens[at]) continue;
      if (goes_on) {
        auto* const to = reinterpret_cast<float4*>(p.first + blockIdx.x * p.hidden + column);
        to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
      } else {
        add_to(p.d_table + tokens[at] * p.hidden + column, sum);
      }
      goes_on = false;
#pragma unroll
      for (float& x_sum : sum)
        x_sum = 0;
    }
  }
}

// The block of the stretch in which a run begins that goes on behind it adds what it has there.
__global__ void __launch_bounds__(kSumThreads) join_stretches(Sorted p) {
  const int last = (static_cast<int>(blockIdx.x) + 1) * kStretch - 1;  // row of the stretch
  if (last + 1 >= p.n) return;
  const int32_t token = p.tokens[last];
  const int begin = last + 1 - kStretch;
  if (p.tokens[last + 1] != token || (begin > 0 && p.tokens[begin - 1] == token)) return;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kColumns + threadIdx.x * kVectorWidth;
  if (column >= p.hidden) return;
  float sum[8] = {};
  for (int row = last + 1; row < p.n && p.tokens[row] == token; row += kStretch) {
    float x[8];
    load_vector(p.first + row / kStretch * p.hidden + column, x);
#pragma unroll
    for (int c = 0; c < 8; ++c)
      sum[c] += x[c];
  }
  add_to(p.d_table + token * p.hidden + column, sum);
}

int64_t stretches_of(int64_t n) {
  return (n + kStretch - 1) / kStretch;
}

// Bytes of each part of the workspace, multiples of 16.
struct Parts {
  Parts(int64_t n, int64_t hidden) {
    check(n >= 0 && n <= INT32_MAX - kStretch && hidden > 0 && hidden % kVectorWidth == 0,
          "an embedding has less than 2^31 rows of a multiple of 8 elements");
    rows = (n * int64_t{sizeof(int32_t)} + 15) / 16 * 16;
    sums = stretches_of(n) * hidden * int64_t{sizeof(float)};
    size_t bytes = 0;
    check_cuda(cub::DeviceRadixSort::SortPairs(
                   nullptr, bytes, static_cast<const int32_t*>(nullptr), static_cast<int32_t*>(nullptr),
                   static_cast<const int32_t*>(nullptr), static_cast<int32_t*>(nullptr), static_cast<int>(n)),
               "asking what a sort needs");
    sort = (static_cast<int64_t>(bytes) + 15) / 16 * 16;
  }
  int64_t all() const { return 3 * rows + sums + sort; }
  int64_t rows = 0, sums = 0, sort = 0;
};

}  // namespace

int64_t embedding_backward_workspace(int64_t n, int64_t hidden) {
  return Parts(n, hidden).all();
}

void embedding_backward(StreamHandle stream, int64_t n, int64_t hidden, int64_t vocabulary,
                        const int32_t* tokens, const BFloat16* dx, float* d_table, void* workspace) {
  const Parts parts(n, hidden);
  check(vocabulary > 0 && vocabulary <= INT32_MAX, "a vocabulary has 1 to 2^31 - 1 tokens");
  if (n == 0) return;
  const NvtxRange range("embedding's gradient");
  auto* const at = static_cast<uint8_t*>(workspace);
  auto* const numbers = reinterpret_cast<int32_t*>(at);
  auto* const sorted_tokens = reinterpret_cast<int32_t*>(at + parts.rows);
  auto* const sorted_rows = reinterpret_cast<int32_t*>(at + 2 * parts.rows);
  const auto count = static_cast<int>(n);
  number_rows<<<static_cast<unsigned>((n + kThreads - 1) / kThreads), kThreads, 0, stream>>>(count, numbers);
  check_launch("numbers of rows", stream);
  const Sorted p{
      count, hidden, sorted_tokens, sorted_rows, dx, d_table, reinterpret_cast<float*>(at + 3 * parts.rows)};
  auto bytes = static_cast<size_t>(parts.sort);
  check_cuda(cub::DeviceRadixSort::SortPairs(
                 at + 3 * parts.rows + parts.sums, bytes, tokens, sorted_tokens, numbers, sorted_rows, count,
                 0, std::bit_width(static_cast<uint32_t>(vocabulary - 1)) + 1, stream),
             "sorting rows by their tokens");
  const dim3 grid(static_cast<unsigned>(stretches_of(n)),
                  static_cast<unsigned>((hidden + kColumns - 1) / kColumns));
  sum_stretches<<<grid, kSumThreads, 0, stream>>>(p);
  check_launch("embedding's gradient", stream);
  join_stretches<<<grid, kSumThreads, 0, stream>>>(p);
  check_launch("embedding's gradient: runs that go on", stream);
}

}  // namespace longhalo

// How the row kernels (norm, SwiGLU, quantisation, embedding) share a row [width] of bf16 among threads.
//
// A row belongs to as many threads as keep it in registers with kKeptVectors 16-byte vectors each, all of
// them loaded before the first is used: one warp for narrow rows (four such rows a block), else one block a
// row. Rows too wide for 1024 threads (width above 32768) are read from memory once for each pass over them.
#pragma once

#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "kernels/common/bf16_vector.cuh"

namespace longhalo {

inline constexpr int kKeptVectors = 4;
inline constexpr int kMaxRowThreads = 1024;

/// threadIdx.x runs along the row, threadIdx.y over the rows of a block.
struct RowLaunch {
  dim3 grid, block;
  int vectors = 0;    // 16-byte vectors in a row
  bool kept = false;  // the row fits the registers of its threads
};

/// For n > 0 rows. Throws InvariantError unless width is a positive multiple of 8.
inline RowLaunch row_launch(int64_t n, int64_t width) {
  check(n > 0 && width > 0 && width % kVectorWidth == 0 && width <= std::numeric_limits<int32_t>::max(),
        "the width of a row is a positive multiple of 8");
  RowLaunch launch;
  launch.vectors = static_cast<int>(width / kVectorWidth);
  const int wanted = ((launch.vectors + kKeptVectors - 1) / kKeptVectors + 31) / 32 * 32;
  launch.kept = wanted <= kMaxRowThreads;
  const int threads = std::min(wanted, kMaxRowThreads);
  const int rows = threads == 32 ? 4 : 1;
  const int64_t blocks = (n + rows - 1) / rows;
  check(blocks <= std::numeric_limits<int32_t>::max(), "the rows of one call fit one grid");
  launch.block = dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows));
  launch.grid = dim3(static_cast<unsigned>(blocks));
  return launch;
}

inline void check_aligned(const void* data, int64_t bytes = 16) {
  check(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0,
        "an array that a GPU kernel reads by vectors is aligned");
}

__device__ inline int64_t row_of_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

/// Calls visit(slot, vector) for this thread's vectors of a row. `slot` counts those that are kept.
template <bool kKept, class Visit>
__device__ inline void for_each_vector(int vectors, Visit visit) {
  if constexpr (kKept) {
#pragma unroll
    for (int slot = 0; slot < kKeptVectors; ++slot) {
      const int at = static_cast<int>(threadIdx.x + slot * blockDim.x);
      if (at < vectors) visit(slot, at);
    }
  } else {
    for (int at = static_cast<int>(threadIdx.x); at < vectors; at += static_cast<int>(blockDim.x))
      visit(0, at);
  }
}

/// The same by whole warps: visit(slot, vector, inside) is called for vectors beyond the row too, with
/// `inside` false.
template <bool kKept, class Visit>
__device__ inline void for_each_vector_of_warps(int vectors, Visit visit) {
  if constexpr (kKept) {
#pragma unroll
    for (int slot = 0; slot < kKeptVectors; ++slot) {
      const int at = static_cast<int>(threadIdx.x + slot * blockDim.x);
      visit(slot, at, at < vectors);
    }
  } else {
    for (int first = 0; first < vectors; first += static_cast<int>(blockDim.x)) {
      const int at = first + static_cast<int>(threadIdx.x);
      visit(0, at, at < vectors);
    }
  }
}

/// This thread's part of a row. NOTE: when the row is not kept, a vector is read where it is asked for, so a
/// kernel that writes over its input must not ask for a vector after writing it.
template <bool kKept>
class Row {
 public:
  __device__ Row(const BFloat16* x, int vectors) : x_(x) {
    if constexpr (kKept)
      for_each_vector<true>(vectors,
                            [&](int slot, int at) { kept_[slot] = load_vector(x + at * kVectorWidth); });
  }
  __device__ Bf16x8 get(int slot, int at) const {
    if constexpr (kKept)
      return kept_[slot];
    else
      return load_vector(x_ + at * kVectorWidth);
  }

 private:
  const BFloat16* x_;
  Bf16x8 kept_[kKept ? kKeptVectors : 1];
};

struct SumMax {
  float sum = 0;
  float max = 0;  // of numbers that are not negative; NaN is passed over
};

__device__ inline SumMax reduce_warp(SumMax mine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    mine.sum += __shfl_xor_sync(0xffffffffU, mine.sum, lanes);
    mine.max = fmaxf(mine.max, __shfl_xor_sync(0xffffffffU, mine.max, lanes));
  }
  return mine;
}

/// Over all threads of this thread's row, the same bits in each. NOTE: at most once in a kernel, for the
/// shared array is not guarded against a second use; every thread of the row must come here.
__device__ inline SumMax reduce_row(SumMax mine) {
  mine = reduce_warp(mine);
  if (blockDim.x == 32) return mine;
  __shared__ SumMax warps[kMaxRowThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  return reduce_warp(lane < static_cast<int>(blockDim.x) / 32 ? warps[lane] : SumMax{});
}

}  // namespace longhalo

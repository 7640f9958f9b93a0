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

/// How a row fits the registers of its threads: not at all; with some to spare; or filling all of them, as
/// the rows of large models do, so that no thread need ask where the row ends.
enum class RowFit { kReadAgain, kKept, kFilled };

/// threadIdx.x runs along the row, threadIdx.y over the rows of a block.
struct RowLaunch {
  dim3 grid, block;
  int vectors = 0;  // 16-byte vectors in a row
  RowFit fit = RowFit::kReadAgain;
};

/// For n > 0 rows. Throws InvariantError unless width is a positive multiple of 8.
inline RowLaunch row_launch(int64_t n, int64_t width) {
  check(n > 0 && width > 0 && width % kVectorWidth == 0 && width <= std::numeric_limits<int32_t>::max(),
        "the width of a row is a positive multiple of 8");
  RowLaunch launch;
  launch.vectors = static_cast<int>(width / kVectorWidth);
  const int wanted = ((launch.vectors + kKeptVectors - 1) / kKeptVectors + 31) / 32 * 32;
  const int threads = std::min(wanted, kMaxRowThreads);
  if (wanted <= kMaxRowThreads)
    launch.fit = launch.vectors == threads * kKeptVectors ? RowFit::kFilled : RowFit::kKept;
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

/// Vectors of a thread that are in registers at once.
template <RowFit kFit>
inline constexpr int kHeldVectors = kFit == RowFit::kReadAgain ? 1 : kKeptVectors;

/// Of three instances of a kernel the one for this launch.
template <class Kernel>
Kernel chosen(const RowLaunch& launch, Kernel read_again, Kernel kept, Kernel filled) {
  switch (launch.fit) {
    case RowFit::kReadAgain:
      return read_again;
    case RowFit::kKept:
      return kept;
    case RowFit::kFilled:
      break;
  }
  return filled;
}

/// By whole warps: calls visit(slot, vector, inside) for this thread's vectors of a row, and for those beyond
/// it, with `inside` false. `slot` counts those that are kept.
template <RowFit kFit, class Visit>
__device__ inline void for_each_vector_of_warps(int vectors, Visit visit) {
  if constexpr (kFit == RowFit::kReadAgain) {
    for (int first = 0; first < vectors; first += static_cast<int>(blockDim.x)) {
      const int at = first + static_cast<int>(threadIdx.x);
      visit(0, at, at < vectors);
    }
  } else {
#pragma unroll
    for (int slot = 0; slot < kKeptVectors; ++slot) {
      const int at = static_cast<int>(threadIdx.x + slot * blockDim.x);
      visit(slot, at, kFit == RowFit::kFilled || at < vectors);
    }
  }
}

/// Calls visit(slot, vector) for this thread's vectors of a row.
template <RowFit kFit, class Visit>
__device__ inline void for_each_vector(int vectors, Visit visit) {
  for_each_vector_of_warps<kFit>(vectors, [&](int slot, int at, bool inside) {
    if (inside) visit(slot, at);
  });
}

/// This thread's part of a row. NOTE: when the row is not kept, a vector is read where it is asked for, so a
/// kernel that writes over its input must not ask for a vector after writing it.
template <RowFit kFit>
class Row {
 public:
  __device__ Row(const BFloat16* x, int vectors) : x_(x) {
    if constexpr (kFit != RowFit::kReadAgain)
      for_each_vector<kFit>(vectors,
                            [&](int slot, int at) { kept_[slot] = load_vector(x + at * kVectorWidth); });
  }
  __device__ Bf16x8 get(int slot, int at) const {
    if constexpr (kFit != RowFit::kReadAgain)
      return kept_[slot];
    else
      return load_vector(x_ + at * kVectorWidth);
  }

 private:
  const BFloat16* x_;
  Bf16x8 kept_[kHeldVectors<kFit>];
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

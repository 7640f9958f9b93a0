// What the two kernels of the portable gradient (attention_backward_portable_*.cu) share: tiles of bf16 rows
// in shared memory, and the two kinds of product between them that attention's gradient is made of.
//
// Each warp owns 16 kM rows of one side (keys for dk and dv, queries for dq) and passes over tiles of kCols
// rows of the other side. rows_times_rows() makes scores and d_out . v, whose sums, as they lie in registers,
// are after rounding to bf16 the weights with which add_weighted_rows() sums rows of the tile.
// Device code only.
#pragma once

#include <cmath>

#include "kernels/attention/band_rows.cuh"
#include "kernels/common/mma.cuh"

namespace longhalo {

inline constexpr int kGradientWarps = 4;
inline constexpr int kGradientThreads = 32 * kGradientWarps;
inline constexpr unsigned kWholeWarp = 0xffffffffU;

// Shared memory holds rows of 2 d bytes. The 16-byte chunk c of row r lies at place c ^ (r % 8) of the row
// (the low three bits), so that 8 rows at the same chunk, what ldmatrix reads, lie in different banks.
template <int kDim>
struct RowShape {
  static constexpr int kPitch = 2 * kDim;
  static constexpr int kChunks = kDim / 8;
  static constexpr int kDepth = kDim / 16;
};

/// Starts the copy of kRows rows of d numbers, zeros from row `count` on (counted from `from`).
template <int kDim, int kRows>
__device__ __forceinline__ void load_tile(uint32_t to, const __nv_bfloat16* from, int64_t row_stride,
                                          int count) {
  using S = RowShape<kDim>;
  constexpr int kStep = kGradientThreads / S::kChunks;  // rows that the block copies at once, 8 or 16
  static_assert(kRows % kStep == 0);
  const int row = static_cast<int>(threadIdx.x) / S::kChunks,
            chunk = static_cast<int>(threadIdx.x) % S::kChunks;
  to += static_cast<uint32_t>(row * S::kPitch + ((chunk ^ (row & 7)) << 4));
  const __nv_bfloat16* source = from + row * row_stride + chunk * 8;
#pragma unroll
  for (int r = 0; r < kRows; r += kStep) {
    const bool there = row + r < count;
    copy_async_16_or_zero(to + r * S::kPitch, there ? source : from, there);
    source += kStep * row_stride;
  }
}

// A lane's addresses of its first fragment (mma.cuh) in rows that begin at offset 0: as the left side of a
// product, as the right side of rows_times_rows(), and as the right side of add_weighted_rows().
template <int kDim>
__device__ __forceinline__ uint32_t left_lane(int lane) {
  return static_cast<uint32_t>((lane % 16) * RowShape<kDim>::kPitch + (((lane / 16) ^ (lane % 8)) << 4));
}
template <int kDim>
__device__ __forceinline__ uint32_t right_lane(int lane) {
  return static_cast<uint32_t>((lane / 16 * 8 + lane % 8) * RowShape<kDim>::kPitch +
                               (((lane / 8 % 2) ^ (lane % 8)) << 4));
}
template <int kDim>
__device__ __forceinline__ uint32_t weighted_lane(int lane) {
  return left_lane<kDim>(lane);
}

/// What a lane holds of a tile of 16 kM rows and kCols columns: rows 16 m + 8 half + lane / 4, columns
/// 8 n + 2 (lane % 4) + c, in [m][n][2 half + c].
template <int kM, int kCols>
using TileSums = float[kM][kCols / 8][4];

/// sums += left right^T; from zero instead where kFromZero. `left` and `right` are the lane's addresses.
template <int kDim, int kM, int kCols, bool kFromZero>
__device__ __forceinline__ void rows_times_rows(TileSums<kM, kCols>& sums, uint32_t left, uint32_t right) {
  using S = RowShape<kDim>;
  const float zero[4] = {0, 0, 0, 0};
#pragma unroll
  for (int step = 0; step < S::kDepth; ++step) {
    const uint32_t swizzle = (step & 3) << 5, far = (step >> 2) << 7;
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
      load_matrices(a[m], (left ^ swizzle) + far + m * 16 * S::kPitch);
#pragma unroll
    for (int pair = 0; pair < kCols / 16; ++pair) {
      uint32_t b[4];
      load_matrices(b, (right ^ swizzle) + far + pair * 16 * S::kPitch);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float(&sum)[4] = sums[m][2 * pair + side];
          if (kFromZero && step == 0)
            multiply_add(sum, a[m], b[2 * side], b[2 * side + 1], zero);
          else
            multiply_add(sum, a[m], b[2 * side], b[2 * side + 1], sum);
        }
      }
    }
  }
}

/// Sums as the left side of a product over the tile's columns.
template <int kM, int kCols>
using TileWeights = uint32_t[kM][kCols / 16][4];

template <int kM, int kCols>
__device__ __forceinline__ void round_weights(TileWeights<kM, kCols>& weights,
                                              const TileSums<kM, kCols>& sums) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int step = 0; step < kCols / 16; ++step) {
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        const float(&from)[4] = sums[m][2 * step + at / 2];
        weights[m][step][at] = pack_bf16(from[2 * (at % 2)], from[2 * (at % 2) + 1]);
      }
    }
  }
}

/// out += weights rows. `rows` is the lane's address of the tile's rows.
template <int kDim, int kM, int kCols>
__device__ __forceinline__ void add_weighted_rows(TileSums<kM, kDim>& out,
                                                  const TileWeights<kM, kCols>& weights, uint32_t rows) {
  using S = RowShape<kDim>;
#pragma unroll
  for (int step = 0; step < kCols / 16; ++step) {
#pragma unroll
    for (int pair = 0; pair < S::kDepth; ++pair) {
      uint32_t b[4];
      load_matrices_transposed(b, (rows ^ ((pair & 3) << 5)) + ((pair >> 2) << 7) + step * 16 * S::kPitch);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float(&left)[4] = out[m][2 * pair];
        float(&right)[4] = out[m][2 * pair + 1];
        multiply_add(left, weights[m][step], b[0], b[1], left);
        multiply_add(right, weights[m][step], b[2], b[3], right);
      }
    }
  }
}

/// Columns [begin, end) of a tile, for each row that a lane holds a part of.
template <int kM>
struct ColumnRanges {
  int begin[kM][2], end[kM][2];
};

/// Sets what lies outside of the ranges to `value`.
template <int kM, int kCols>
__device__ __forceinline__ void mask_tile(TileSums<kM, kCols>& sums, const ColumnRanges<kM>& ranges,
                                          float value) {
  const int first = 2 * (static_cast<int>(threadIdx.x) % 4);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = ranges.begin[m][half] - first, end = ranges.end[m][half] - first;
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = 8 * n + c;
          if (column < begin || column >= end) sums[m][n][2 * half + c] = value;
        }
      }
    }
  }
}

template <int kM, int kCols>
__device__ __forceinline__ void clear(TileSums<kM, kCols>& sums) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n)
      sums[m][n][0] = sums[m][n][1] = sums[m][n][2] = sums[m][n][3] = 0;
  }
}

}  // namespace longhalo

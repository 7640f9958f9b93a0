// What the forward and the backward tile of attention share: the product of a few keys and a block of rows,
// and what a block of rows sees. For the *_simd.cpp files only (common/isa.hpp says how those work).
#pragma once

#include <cstdint>

#include "kernels/attention/attention_tile.hpp"
#include "kernels/common/simd.hpp"

namespace longhalo::LONGHALO_ISA {

// The inner loops keep kStep x kVectors accumulators: as many as the registers hold beside the operands.
#if defined(__AVX512F__)
constexpr int kStep = 8, kVectors = 2;
#else
constexpr int kStep = 4, kVectors = 3;
#endif
constexpr int64_t kBlock = kVectors * kLanes;
static_assert(kBlock <= kMaxRowBlock && kStep <= 8);

template <int kRows, int kColumns>
struct Sums {
  Float at[kRows][kColumns];
};
using Accumulators = Sums<kStep, kVectors>;

/// sums[m] += sum over i < count of a[m * a_row + i * a_step] * b[i]; the vectors b[i] stand at b + i *
/// b_row.
template <int kRows, int kColumns>
LONGHALO_INLINE void multiply(int64_t count, const float* a, int64_t a_row, int64_t a_step, const float* b,
                              int64_t b_row, Sums<kRows, kColumns>& sums) {
  for (int64_t i = 0; i < count; ++i) {
    Float right[kColumns];
#pragma GCC unroll 8
    for (int v = 0; v < kColumns; ++v)
      right[v] = load(b + i * b_row + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const Float left = splat(a[m * a_row + i * a_step]);
#pragma GCC unroll 8
      for (int v = 0; v < kColumns; ++v)
        sums.at[m][v] += left * right[v];
    }
  }
}

/// The same with b [count, kBlock], but a weight of 0 adds nothing at all, whatever stands in `a`: the value
/// of a key that a row does not see may be anything, NaN included.
LONGHALO_INLINE void multiply_seen(int64_t count, const float* a, int64_t a_row, int64_t a_step,
                                   const float* b, Accumulators& sums) {
  for (int64_t i = 0; i < count; ++i) {
    for (int m = 0; m < kStep; ++m) {
      const Float left = splat(a[m * a_row + i * a_step]);
      for (int v = 0; v < kVectors; ++v) {
        const Float right = load(b + i * kBlock + v * kLanes);
        const Float term = left * right;
        sums.at[m][v] += right == 0.0F ? Float{} : term;
      }
    }
  }
}

// What the rows of one block see of one band.
struct Seen {
  int64_t any_begin, any_end;  // keys that some row sees
  int64_t all_begin, all_end;  // keys that every row sees
};

LONGHALO_INLINE Seen seen_by_block(const int64_t* row_begin, const int64_t* row_end) {
  Seen seen{INT64_MAX, INT64_MIN, INT64_MIN, INT64_MAX};
  for (int64_t r = 0; r < kBlock; ++r) {
    const int64_t begin = row_begin[r], end = row_end[r];
    if (begin >= end) {
      seen.all_begin = INT64_MAX;
      continue;
    }
    if (begin < seen.any_begin) seen.any_begin = begin;
    if (end > seen.any_end) seen.any_end = end;
    if (begin > seen.all_begin) seen.all_begin = begin;
    if (end < seen.all_end) seen.all_end = end;
  }
  return seen;
}

LONGHALO_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

LONGHALO_INLINE void copy_rows(int64_t rows, int64_t d, const float* from, int64_t stride, float* to) {
  for (int64_t r = 0; r < rows; ++r)
    __builtin_memcpy(to + r * d, from + r * stride, static_cast<size_t>(d) * 4);
}

}  // namespace longhalo::LONGHALO_ISA

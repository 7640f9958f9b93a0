// Rows in the fp8 format e4m3, each with its own scale: x[i, c] is about values[i, c] * scales[i], or, where
// what the rows have in common is taken off before they are rounded, values[i, c] * scales[i] + mean[c]. A
// product then gets the mean's part as a bias, x W^T = (x - mean) W^T + mean W^T, and e4m3's error, which is
// a share of each number, is one of what is left. Any mean is right; a good one makes the numbers small.
//
// A few columns, the outliers, make much of a product's error. Their rounding errors can be stored as well,
// as further columns with the same scale; a matrix that has these columns twice then multiplies them all but
// exactly.
#pragma once

#include <cstdint>

#include "core/bfloat16.hpp"

namespace longhalo {

struct OutlierColumns {
  const int32_t* columns = nullptr;  // [count], each below width
  int64_t count = 0;  // a multiple of 8, at most the threads of a row: width / 32 rounded up to 32, or 1024
};

struct Fp8Rows {
  Fp8E4M3* values = nullptr;       // [n, width + outliers.count]
  float* scales = nullptr;         // [n]; largest |x - mean| of the row / 448, or somewhat more
  const BFloat16* mean = nullptr;  // [width], 16-byte aligned; nullptr: 0
  float largest_mean = 0;          // its largest magnitude
  OutlierColumns outliers = {};
};

struct ConstFp8Rows {
  // As a pointer becomes a pointer to const. NOLINTNEXTLINE(google-explicit-constructor)
  ConstFp8Rows(const Fp8Rows& rows) : values(rows.values), scales(rows.scales) {}
  ConstFp8Rows(const Fp8E4M3* values, const float* scales) : values(values), scales(scales) {}
  const Fp8E4M3* values;
  const float* scales;
};

}  // namespace longhalo

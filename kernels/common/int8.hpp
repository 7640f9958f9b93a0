// Rows in int8, each with its own scale, in the coordinates of a Hadamard transform H of blocks of 64
// neighbours (entries 1/8 and -1/8, H = H^T = H^-1): of each block b, x[i, b] is about H values[i, b] *
// scales[i]. The transform spreads a block's outliers over the block, so that one scale a row serves all of
// it; a product of two such arrays along their rows is that of the arrays they stand for.
#pragma once

#include <cstdint>

namespace longhalo {

inline constexpr int64_t kHadamardBlock = 64;
inline constexpr float kLargestInt8 = 127;  // -128 is not used

struct Int8Rows {
  int8_t* values = nullptr;  // [n, width], width a multiple of 64
  float* scales = nullptr;   // [n]; largest |H x| of the row / 127
};

struct ConstInt8Rows {
  // As a pointer becomes a pointer to const. NOLINTNEXTLINE(google-explicit-constructor)
  ConstInt8Rows(const Int8Rows& rows) : values(rows.values), scales(rows.scales) {}
  ConstInt8Rows(const int8_t* values, const float* scales) : values(values), scales(scales) {}
  const int8_t* values;
  const float* scales;
};

}  // namespace longhalo

// Rows in the fp8 format e4m3, each with its own scale: x[i, c] is about values[i, c] * scales[i].
#pragma once

#include "core/bfloat16.hpp"

namespace longhalo {

struct Fp8Rows {
  Fp8E4M3* values = nullptr;  // [n, width]
  float* scales = nullptr;    // [n]; largest |x| of the row / 448, or up to twice that
};

struct ConstFp8Rows {
  // As a pointer becomes a pointer to const. NOLINTNEXTLINE(google-explicit-constructor)
  ConstFp8Rows(const Fp8Rows& rows) : values(rows.values), scales(rows.scales) {}
  ConstFp8Rows(const Fp8E4M3* values, const float* scales) : values(values), scales(scales) {}
  const Fp8E4M3* values;
  const float* scales;
};

}  // namespace longhalo

// The 16-bit types of device arrays, without any CUDA header: bfloat16 (8 bits of exponent, 7 of fraction)
// and the fp8 format e4m3 (4 and 3, largest 448, no infinity). Storage only; kernels compute in fp32.
#pragma once

#include <bit>
#include <cstdint>

namespace longhalo {

struct BFloat16 {
  uint16_t bits = 0;
};

struct Fp8E4M3 {
  uint8_t bits = 0;
};

inline constexpr float kLargestE4M3 = 448;

inline float to_float(BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

/// Rounds to nearest, ties to even; NaN stays NaN.
inline BFloat16 to_bfloat16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return {static_cast<uint16_t>((bits >> 16) | 0x40U)};
  return {static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

}  // namespace longhalo

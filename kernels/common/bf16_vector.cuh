// Eight bf16 numbers as one 16-byte access, and their way to fp32 and back (to bf16 or to fp8 e4m3).
// Device code only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "core/bfloat16.hpp"

namespace longhalo {

inline constexpr int kVectorWidth = 8;  // bf16 numbers in 16 bytes

struct Bf16x8 {
  uint32_t pairs[4];
};

/// `x` is 16-byte aligned, here and below.
__device__ inline Bf16x8 load_vector(const BFloat16* x) {
  const uint4 raw = *reinterpret_cast<const uint4*>(x);
  return {{raw.x, raw.y, raw.z, raw.w}};
}

/// NOTE: an assignment through a uint4* is taken apart into four stores by the compiler now and then.
__device__ inline void store_vector(BFloat16* x, const Bf16x8& v) {
  __stwb(reinterpret_cast<uint4*>(x), make_uint4(v.pairs[0], v.pairs[1], v.pairs[2], v.pairs[3]));
}

__device__ inline void load_vector(const float* x, float (&to)[8]) {
  const float4 low = *reinterpret_cast<const float4*>(x);
  const float4 high = *reinterpret_cast<const float4*>(x + 4);
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

__device__ inline void unpack(const Bf16x8& v, float (&to)[8]) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    to[2 * p] = __uint_as_float(v.pairs[p] << 16);
    to[2 * p + 1] = __uint_as_float(v.pairs[p] & 0xffff0000U);
  }
}

/// Rounds to nearest, ties to even.
__device__ inline Bf16x8 pack(const float (&from)[8]) {
  Bf16x8 v;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(from[2 * p], from[2 * p + 1]);
    v.pairs[p] = static_cast<uint32_t>(__bfloat16_as_ushort(pair.x)) |
                 static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16;
  }
  return v;
}

__device__ inline float to_float_device(BFloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

__device__ inline BFloat16 to_bfloat16_device(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}

__device__ inline float to_float_device(Fp8E4M3 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3)));
}

/// Rounds to nearest, ties to even; beyond 448 is 448, NaN stays NaN.
__device__ inline Fp8E4M3 to_e4m3_device(float x) {
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
}

/// The same for eight; `to` is 8-byte aligned.
__device__ inline void store_e4m3(Fp8E4M3* to, const float (&from)[8]) {
  uint32_t words[2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const auto low =
        __nv_cvt_float2_to_fp8x2(make_float2(from[4 * w], from[4 * w + 1]), __NV_SATFINITE, __NV_E4M3);
    const auto high =
        __nv_cvt_float2_to_fp8x2(make_float2(from[4 * w + 2], from[4 * w + 3]), __NV_SATFINITE, __NV_E4M3);
    words[w] = static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
  }
  *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
}

}  // namespace longhalo

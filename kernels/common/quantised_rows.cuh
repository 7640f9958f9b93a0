// What a row kernel does to write its result in eight bits: the same names for e4m3 (fp8.hpp) and for int8 in
// rotated coordinates (int8.hpp), so that each kernel is written once. Device code only.
//
//     rotate(out, v)               eight neighbours of a row into the coordinates of the format
//     magnitude(out, x)            what the largest of a row is sought among
//     row_scale(out, largest)      the scale of a row
//     store(out, at, v)            rounds v, which is multiplied with the scale's inverse, at element `at`
#pragma once

#include "kernels/common/fp8.hpp"
#include "kernels/common/int8.hpp"
#include "kernels/common/rows.cuh"

namespace longhalo {

struct RowScale {
  float scale;    // what the stored values are to be multiplied with
  float inverse;  // what values are multiplied with before they are rounded
};

inline constexpr float kLeastMagnitude = 0x1p-110F;  // below, the inverse of a scale nears fp32's end

// ---- e4m3

__device__ inline void rotate(const Fp8Rows&, float (&)[8]) {}

__device__ inline float magnitude(const Fp8Rows&, float x) {
  return fabsf(x);
}

/// A row that holds an infinity becomes NaN throughout.
__device__ inline RowScale row_scale(const Fp8Rows&, float largest) {
  if (largest < kLeastMagnitude) return {0, 0};
  return {__fdiv_rn(largest, kLargestE4M3), __fdiv_rn(kLargestE4M3, largest)};
}

__device__ inline void store(const Fp8Rows& out, int64_t at, const float (&v)[8]) {
  store_e4m3(out.values + at, v);
}

// ---- int8. The transform of 64 numbers is one of eight along the rows and one along the columns of an 8 x 8
// matrix, which lies in eight threads. Without its factor of 1/8, which goes into the scale.

__device__ inline void transform_eight(float (&v)[8]) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & step) != 0) continue;
      const float sum = v[i] + v[i + step], difference = v[i] - v[i + step];
      v[i] = sum, v[i + step] = difference;
    }
  }
}

/// NOTE: threads 8 t to 8 t + 7 of a warp come here together, with the 64 neighbours of a block in order.
__device__ inline void rotate(const Int8Rows&, float (&v)[8]) {
  transform_eight(v);
  // Transposed: half of what a thread has for half of what another has, three times.
  const unsigned lane = threadIdx.x % 32, threads = 0xffU << (lane & 24U);
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    const bool upper = (lane & static_cast<unsigned>(step)) != 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & step) != 0) continue;
      const float other = __shfl_xor_sync(threads, upper ? v[i] : v[i + step], step);
      (upper ? v[i] : v[i + step]) = other;
    }
  }
  transform_eight(v);
}

/// int8 has no NaN, so one makes its row infinite, and row_scale() the whole row NaN.
__device__ inline float magnitude(const Int8Rows&, float x) {
  return isnan(x) ? INFINITY : fabsf(x);
}

__device__ inline RowScale row_scale(const Int8Rows&, float largest) {
  if (largest < kLeastMagnitude) return {0, 0};
  if (isinf(largest)) return {NAN, 0};
  return {__fdiv_rn(largest, 8 * kLargestInt8), __fdiv_rn(kLargestInt8, largest)};
}

/// To nearest, ties to even. No value is beyond 127, which the row's largest becomes.
__device__ inline void store(const Int8Rows& out, int64_t at, const float (&v)[8]) {
  constexpr float kOnes = 0x1.8p23F;  // where fp32's last bit is 1: the sum's last byte is v as an integer
  uint32_t byte[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    byte[i] = __float_as_uint(v[i] + kOnes);
  const auto word = [&](int i) {
    return __byte_perm(__byte_perm(byte[i], byte[i + 1], 0x0040),
                       __byte_perm(byte[i + 2], byte[i + 3], 0x0040), 0x5410);
  };
  *reinterpret_cast<uint2*>(out.values + at) = make_uint2(word(0), word(4));
}

/// Of the format's rows: that width and addresses are what the functions above take.
inline void check_rows(int64_t, const Fp8Rows& out) {
  check_aligned(out.values, 8);
}
inline void check_rows(int64_t width, const Int8Rows& out) {
  check(width % kHadamardBlock == 0, "rows in int8 are blocks of 64");
  check_aligned(out.values, 8);
}

}  // namespace longhalo

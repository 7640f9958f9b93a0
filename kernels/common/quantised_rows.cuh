// What a row kernel does to write its result in eight bits: the same names for e4m3 (fp8.hpp) and for int8 in
// rotated coordinates (int8.hpp), so that each kernel is written once. Device code only.
//
//     centre(out, column, v)       takes the mean off eight neighbours of a row, from `column` on
//     largest_centred(out, x)      what no magnitude exceeds once the mean is off, if x was the largest
//     rotate(out, v)               eight neighbours into the coordinates of the format
//     larger(out, largest, x)      the larger magnitude
//     row_scale(out, largest)      the scale of a row
//     stored_width(out, width)     elements that a row is stored as
//     store(out, at, v, inverse)   rounds v times the scale's inverse, at element `at`
//     outlier_of_thread(out)       this thread's column of out's outliers, if it has one
//     store_outlier(out, at, outlier, v, inverse)   its rounding error, v being what store() got of it; `at`
//                                  is where those of the row begin
#pragma once

#include "kernels/common/fp8.hpp"
#include "kernels/common/int8.hpp"
#include "kernels/common/mma.cuh"
#include "kernels/common/rows.cuh"

namespace longhalo {

struct RowScale {
  float scale;    // what the stored values are to be multiplied with
  float inverse;  // what values are multiplied with before they are rounded
};

struct Outlier {
  int32_t column = -1;
  float mean = 0;  // of the column
  __device__ bool is_one() const { return column >= 0; }
};

/// What a thread found, for reduce_row(), which passes over NaN.
__device__ inline SumMax found(SumMax mine) {
  if (isnan(mine.max)) mine.max = INFINITY;
  return mine;
}

inline constexpr float kLeastMagnitude = 0x1p-110F;  // below, the inverse of a scale nears fp32's end

// ---- e4m3

/// `unit`: the mean is in units of v times that.
__device__ inline void centre(const Fp8Rows& out, int64_t column, float (&v)[8], float unit = 1) {
  if (out.mean == nullptr) return;
  float mean[8];
  unpack(load_vector(out.mean + column), mean);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    v[i] = fmaf(-unit, mean[i], v[i]);
}

__device__ inline float largest_centred(const Fp8Rows& out, float largest, float unit) {
  return out.mean == nullptr ? largest : fmaf(unit, out.largest_mean, largest);
}

__device__ inline void rotate(const Fp8Rows&, float (&)[8]) {}

__device__ inline float larger(const Fp8Rows&, float largest, float x) {
  return fmaxf(largest, fabsf(x));
}

/// A row that holds an infinity becomes NaN throughout.
__device__ inline RowScale row_scale(const Fp8Rows&, float largest) {
  if (largest < kLeastMagnitude) return {0, 0};
  return {__fdiv_rn(largest, kLargestE4M3), __fdiv_rn(kLargestE4M3, largest)};
}

__device__ inline int64_t stored_width(const Fp8Rows& out, int64_t width) {
  return width + out.outliers.count;
}

__device__ inline void store(const Fp8Rows& out, int64_t at, const float (&v)[8], float inverse) {
  float scaled[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    scaled[i] = v[i] * inverse;
  store_e4m3(out.values + at, scaled);
}

/// Asked for at the beginning of a kernel, so that no row waits for it at the end. What the column holds is
/// asked for later, when it is in the cache.
__device__ inline Outlier outlier_of_thread(const Fp8Rows& out) {
  if (threadIdx.x >= out.outliers.count) return {};
  const int32_t column = out.outliers.columns[threadIdx.x];
  return {column, out.mean == nullptr ? 0 : to_float_device(out.mean[column])};
}

__device__ inline void store_outlier(const Fp8Rows& out, int64_t at, const Outlier& outlier, float v,
                                     float inverse) {
  if (!outlier.is_one()) return;
  const float scaled = v * inverse;
  out.values[at + threadIdx.x] = to_e4m3_device(scaled - to_float_device(to_e4m3_device(scaled)));
}

// ---- int8. The transform of 64 numbers is one of sixteen, in four groups, and one of four of what comes
// out. The former is a product with a matrix of 1 and -1 on the tensor cores, which add exactly what is
// rounded to bf16; the latter two butterflies, one within a thread and one between threads. Their common
// factor of 1/8 goes into the scale.

__device__ inline void centre(const Int8Rows&, int64_t, float (&)[8], float = 1) {}

__device__ inline float largest_centred(const Int8Rows&, float largest, float) {
  return largest;
}

__device__ inline int64_t stored_width(const Int8Rows&, int64_t width) {
  return width;
}

/// NOTE: by whole warps; threads 8 t to 8 t + 7 hold the 64 neighbours of a block, eight each, in order.
__device__ inline void rotate(const Int8Rows&, float (&v)[8]) {
  // A quad of threads holds two groups, each four neighbours of every thread. As rows of the operand of
  // mma.m16n8k16, number k of a group has the bits (e1, t1, t0, e0) of its place e in thread t; so has column
  // n of what comes out, and the whole transform is in natural order.
  const unsigned lane = threadIdx.x % 32, k = 2 * (lane % 4), n = lane / 4;
  const uint32_t ones = 0x3f803f80U ^ (__popc(k & n) & 1U) << 15 ^ (__popc((k + 1) & n) & 1U) << 31;
  const uint32_t a[4] = {pack_bf16(v[0], v[1]), pack_bf16(v[4], v[5]), pack_bf16(v[2], v[3]),
                         pack_bf16(v[6], v[7])};
  float low[4] = {}, high[4] = {};  // columns 0 to 7 and 8 to 15: of both groups
  multiply_add(low, a, ones, ones, low);
  multiply_add(high, a, ones, ones ^ 0x80008000U, high);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    v[i] = low[i] + low[i + 2], v[i + 4] = low[i] - low[i + 2];
    v[i + 2] = high[i] + high[i + 2], v[i + 6] = high[i] - high[i + 2];
  }
  const float sign = (lane & 4U) != 0 ? -1.0F : 1.0F;
#pragma unroll
  for (float& x : v)
    x = fmaf(sign, x, __shfl_xor_sync(0xffffffffU, x, 4));
}

/// int8 has no NaN, so one stays the largest of what a thread has, and makes its row's NaN by way of
/// infinity.
__device__ inline float larger(const Int8Rows&, float largest, float x) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(largest), "f"(fabsf(x)));
  return result;
}

__device__ inline RowScale row_scale(const Int8Rows&, float largest) {
  if (largest < kLeastMagnitude) return {0, 0};
  if (isinf(largest)) return {NAN, 0};
  return {__fdiv_rn(largest, 8 * kLargestInt8), __fdiv_rn(kLargestInt8, largest)};
}

/// To nearest, ties to even. No value is beyond 127, which the row's largest becomes.
__device__ inline void store(const Int8Rows& out, int64_t at, const float (&v)[8], float inverse) {
  constexpr float kOnes = 0x1.8p23F;  // where fp32's last bit is 1: the sum's last byte is v as an integer
  uint32_t byte[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    byte[i] = __float_as_uint(fmaf(v[i], inverse, kOnes));
  const auto word = [&](int i) {
    return __byte_perm(__byte_perm(byte[i], byte[i + 1], 0x0040),
                       __byte_perm(byte[i + 2], byte[i + 3], 0x0040), 0x5410);
  };
  *reinterpret_cast<uint2*>(out.values + at) = make_uint2(word(0), word(4));
}

__device__ inline Outlier outlier_of_thread(const Int8Rows&) {
  return {};
}

__device__ inline void store_outlier(const Int8Rows&, int64_t, const Outlier&, float, float) {}

/// Of the format's rows: that width and addresses are what the functions above take, and the launch, too.
inline void check_rows(int64_t, const Fp8Rows& out, const RowLaunch& at) {
  check_aligned(out.values, 8);
  check_aligned(out.mean);
  check(out.outliers.count % kVectorWidth == 0 && out.outliers.count <= int64_t{at.block.x},
        "outliers fill vectors, and a row has a thread for each");
}
inline void check_rows(int64_t width, const Int8Rows& out, const RowLaunch&) {
  check(width % kHadamardBlock == 0, "rows in int8 are blocks of 64");
  check_aligned(out.values, 8);
}

}  // namespace longhalo

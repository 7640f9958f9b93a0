// fp32 vectors as wide as the instruction set that this file is being compiled for, for the *_simd.cpp files
// only (isa.hpp says how those work). GCC vector extensions carry the arithmetic; intrinsics only where they
// have no word.
#pragma once

#include <cstdint>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace longhalo::LONGHALO_ISA {

#define LONGHALO_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
inline constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int64_t kLanes = 8;
#else
inline constexpr int64_t kLanes = 4;
#endif

typedef float Float __attribute__((vector_size(kLanes * 4)));
typedef int32_t Int __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedFloat __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t UnalignedInt __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

LONGHALO_INLINE Float load(const float* p) {
  return *reinterpret_cast<const UnalignedFloat*>(p);
}
LONGHALO_INLINE Int load(const int32_t* p) {
  return *reinterpret_cast<const UnalignedInt*>(p);
}
LONGHALO_INLINE void store(float* p, Float x) {
  *reinterpret_cast<UnalignedFloat*>(p) = x;
}
/// x in every lane. NOTE: x - 0 is x and costs nothing; x + 0 is an addition, because of x = -0.
LONGHALO_INLINE Float splat(float x) {
  return x - Float{};
}
LONGHALO_INLINE Int splat(int32_t x) {
  return Int{} + x;
}

/// The larger of each lane; `b` where either is NaN.
LONGHALO_INLINE Float max(Float a, Float b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

LONGHALO_INLINE Int is_nan(Float x) {
  const Float same = x;
  return x != same;
}

/// The first `count` lanes of an array's end (all of them when there are more); the others are 0 and not
/// read.
LONGHALO_INLINE Float load_part(const float* p, int64_t count) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>(count >= kLanes ? 0xffff : (1 << count) - 1), p);
#else
  Float x{};
  for (int i = 0; i < kLanes && i < count; ++i)
    x[i] = p[i];
  return x;
#endif
}
LONGHALO_INLINE void store_part(float* p, int64_t count, Float x) {
  for (int i = 0; i < kLanes && i < count; ++i)
    p[i] = x[i];
}

LONGHALO_INLINE float sum_lanes(Float x) {
#if defined(__AVX512F__)
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
#elif defined(__AVX2__)
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
  return (x[0] + x[2]) + (x[1] + x[3]);
}

LONGHALO_INLINE float max_lanes(Float x) {
  float top = x[0];
  for (int i = 1; i < kLanes; ++i)
    top = x[i] > top ? x[i] : top;
  return top;
}

/// Whether any lane of a comparison is true.
LONGHALO_INLINE bool any(Int mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8(reinterpret_cast<__m256i>(mask)) != 0;
#else
  int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i)
    bits |= mask[i];
  return bits != 0;
#endif
}

/// p * 2^n for a whole n in [-127, 127]; n = -127 gives exactly 0.
LONGHALO_INLINE Float scale_by_power(Float p, Float n) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  return p * reinterpret_cast<Float>((__builtin_convertvector(n, Int) + 127) << 23);
#endif
}

LONGHALO_INLINE Float round_to_whole(Float x) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return (x + 12582912.0F) - 12582912.0F;  // 1.5 * 2^23: the sum has no room for a fraction
#endif
}

#if defined(__AVX512F__)
inline constexpr float kExp2Zero = -200.0F;  // scalef underflows to 0 by itself
#else
inline constexpr float kExp2Zero = -127.0F;
#endif

/// 2^x for x <= 127, within 2 ulp; exactly 1 at 0 and exactly 0 for x <= kExp2Zero, -infinity included. NaN
/// stays NaN. Minimax polynomial (Remez, relative error 7.5e-8, the constant term then set to 1) on [-1/2,
/// 1/2].
LONGHALO_INLINE Float exp2_lanes(Float x) {
  x = max(splat(kExp2Zero), x);
  const Float n = round_to_whole(x);
  const Float f = x - n;
  Float p = splat(1.3276472e-3F);
  p = p * f + 9.675541e-3F;
  p = p * f + 5.5507131e-2F;
  p = p * f + 2.402212e-1F;
  p = p * f + 6.9314694e-1F;
  p = p * f + 1.0F;
  return scale_by_power(p, n);
}

/// e^x for |x| <= 87, within 2 ulp; below -87 a number of at most 1e-37, above 87 one of at least 1e37; NaN
/// stays NaN. n * ln 2 is taken off in two parts (Cody and Waite), so that large |x| lose nothing.
LONGHALO_INLINE Float exp_lanes(Float x) {
  x = max(splat(-88.0F), x);
  x = -max(splat(-88.0F), -x);
  const Float n = round_to_whole(x * 1.44269504F);
  const Float f = ((x - n * 0.693359375F) - n * -2.12194440e-4F) * 1.44269504F;
  Float p = splat(1.5345812e-4F);
  p = p * f + 1.3399931e-3F;
  p = p * f + 9.618489e-3F;
  p = p * f + 5.5503286e-2F;
  p = p * f + 2.4022646e-1F;
  p = p * f + 6.9314718e-1F;
  p = p * f + 1.0F;
  return scale_by_power(p, n);
}

}  // namespace longhalo::LONGHALO_ISA

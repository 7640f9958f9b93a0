#include "kernels/matmul/gemv_simd.hpp"

#include "kernels/common/simd.hpp"

namespace longhalo::LONGHALO_ISA {
namespace {

struct Product {
  int64_t out, in;
  const float* a;
  const float* w;
  float* c;
  bool add;
};

// kColumns rows of w at a time: several streams keep more of the memory's bandwidth busy than one.
template <int kRows, int kColumns>
LONGHALO_INLINE void dot(const Product& p, int64_t o) {
  Float sums[kColumns][kRows] = {};
  const float* w = p.w + o * p.in;
  int64_t x = 0;
  for (; x + kLanes <= p.in; x += kLanes) {
    Float a[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
      a[i] = load(p.a + i * p.in + x);
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) {
      const Float weight = load(w + j * p.in + x);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i)
        sums[j][i] += weight * a[i];
    }
  }
  if (x < p.in) {
    for (int j = 0; j < kColumns; ++j) {
      const Float weight = load_part(w + j * p.in + x, p.in - x);
      for (int i = 0; i < kRows; ++i)
        sums[j][i] += weight * load_part(p.a + i * p.in + x, p.in - x);
    }
  }
  for (int j = 0; j < kColumns; ++j) {
    for (int i = 0; i < kRows; ++i) {
      float* c = p.c + i * p.out + o + j;
      const float sum = sum_lanes(sums[j][i]);
      *c = p.add ? *c + sum : sum;
    }
  }
}

template <int kRows>
LONGHALO_INLINE void all_columns(const Product& p, int64_t begin, int64_t end) {
  int64_t o = begin;
  for (; o + 4 <= end; o += 4)
    dot<kRows, 4>(p, o);
  for (; o < end; ++o)
    dot<kRows, 1>(p, o);
}

void columns(int64_t m, int64_t out, int64_t in, int64_t begin, int64_t end, const float* a, const float* w,
             float* c, bool add) {
  const Product p{out, in, a, w, c, add};
  if (m == 1) all_columns<1>(p, begin, end);
  if (m == 2) all_columns<2>(p, begin, end);
  if (m == 3) all_columns<3>(p, begin, end);
  if (m == 4) all_columns<4>(p, begin, end);
}

}  // namespace

extern const GemvKernels gemv_kernels{columns};

}  // namespace longhalo::LONGHALO_ISA

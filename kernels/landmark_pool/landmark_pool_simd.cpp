#include "kernels/landmark_pool/landmark_pool_simd.hpp"

#include "kernels/common/simd.hpp"

namespace longhalo::LONGHALO_ISA {
namespace {

constexpr int64_t kPortion = 64;  // tokens whose weights are alive at once; a multiple of the lanes

float dot(int64_t d, const float* a, const float* b) {
  Float sum{};
  int64_t c = 0;
  for (; c + kLanes <= d; c += kLanes)
    sum += load(a + c) * load(b + c);
  if (c < d) sum += load_part(a + c, d - c) * load_part(b + c, d - c);
  return sum_lanes(sum);
}

void scale(int64_t d, float factor, float* x) {
  for (int64_t c = 0; c < d; ++c)
    x[c] *= factor;
}

// to += sum over tokens of weight[t] * x[t * stride]
void add_weighted(int64_t tokens, int64_t d, int64_t stride, const float* weight, const float* x, float* to) {
  int64_t c = 0;
  for (; c + kLanes <= d; c += kLanes) {
    Float sum = load(to + c);
    for (int64_t t = 0; t < tokens; ++t)
      sum += load(x + t * stride + c) * weight[t];
    store(to + c, sum);
  }
  for (; c < d; ++c)
    for (int64_t t = 0; t < tokens; ++t)
      to[c] += weight[t] * x[t * stride + c];
}

void add(int64_t tokens, int64_t d, int64_t stride, const float* u, const float* k, const float* v,
         OpenSegment& open) {
  for (int64_t t = 0; t < tokens; t += kPortion) {
    const int64_t count = tokens - t < kPortion ? tokens - t : kPortion;
    float weight[kPortion] = {};
    float top = open.m;
    for (int64_t j = 0; j < count; ++j) {
      if (u != nullptr) weight[j] = dot(d, u, k + (t + j) * stride);
      top = weight[j] > top ? weight[j] : top;
    }
    if (top != open.m) {
      const float shrink =
          exp_lanes(splat(open.m - top))[0];  // about 1e-38 for the first portion, whose sums are 0
      open.l *= shrink;
      scale(d, shrink, open.k_sum);
      scale(d, shrink, open.v_sum);
      open.m = top;
    }
    for (int64_t j = 0; j < kPortion; j += kLanes)
      store(weight + j, exp_lanes(load(weight + j) - top));
    for (int64_t j = 0; j < count; ++j)
      open.l += weight[j];
    add_weighted(count, d, stride, weight, k + t * stride, open.k_sum);
    add_weighted(count, d, stride, weight, v + t * stride, open.v_sum);
  }
}

}  // namespace

extern const LandmarkPoolKernels landmark_pool_kernels{add};

}  // namespace longhalo::LONGHALO_ISA

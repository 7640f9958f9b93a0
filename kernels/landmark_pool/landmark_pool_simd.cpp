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

// to += factor * x
void add_scaled(int64_t d, float factor, const float* x, float* to) {
  int64_t c = 0;
  for (; c + kLanes <= d; c += kLanes)
    store(to + c, load(to + c) + load(x + c) * factor);
  for (; c < d; ++c)
    to[c] += factor * x[c];
}

void gradient(const SegmentGradient& s) {
  float top = s.u != nullptr ? -__builtin_inff() : 0.0F;
  for (int64_t j = 0; j < s.tokens; ++j) {
    const float* k = s.k + j * s.stride;
    s.weight[j] = s.u != nullptr ? dot(s.d, s.u, k) : 0.0F;
    top = s.weight[j] > top ? s.weight[j] : top;
    s.d_score[j] = dot(s.d, s.d_kbar, k) + dot(s.d, s.d_vbar, s.v + j * s.stride);
  }
  for (int64_t j = 0; j < s.tokens; j += kLanes)
    store_part(s.weight + j, s.tokens - j, exp_lanes(load_part(s.weight + j, s.tokens - j) - top));
  double sum = 0, mean = 0;
  for (int64_t j = 0; j < s.tokens; ++j) {
    sum += static_cast<double>(s.weight[j]);
    mean += static_cast<double>(s.weight[j]) * static_cast<double>(s.d_score[j]);
  }
  const auto share = static_cast<float>(1 / sum), centre = static_cast<float>(mean / sum);
  if (s.d_u != nullptr)
    for (int64_t c = 0; c < s.d; ++c)
      s.d_u[c] = 0;
  for (int64_t j = 0; j < s.tokens; ++j) {
    const float weight = s.weight[j] * share, d_score = weight * (s.d_score[j] - centre);
    add_scaled(s.d, weight, s.d_kbar, s.dk + j * s.stride);
    if (s.u != nullptr) add_scaled(s.d, d_score, s.u, s.dk + j * s.stride);
    add_scaled(s.d, weight, s.d_vbar, s.dv + j * s.stride);
    if (s.d_u != nullptr) add_scaled(s.d, d_score, s.k + j * s.stride, s.d_u);
  }
}

}  // namespace

extern const LandmarkPoolKernels landmark_pool_kernels{add, gradient};

}  // namespace longhalo::LONGHALO_ISA

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"
#include "kernels/landmark_pool/landmark_pool_simd.hpp"

namespace longhalo {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

}  // namespace

LandmarkPoolState::LandmarkPoolState(int64_t kv_heads, int64_t head_dim)
    : m(static_cast<size_t>(kv_heads)),
      l(static_cast<size_t>(kv_heads)),
      k_sum(static_cast<size_t>(kv_heads * head_dim)),
      v_sum(static_cast<size_t>(kv_heads * head_dim)) {
  clear();
}

void LandmarkPoolState::clear() {
  tokens = 0;
  std::fill(m.begin(), m.end(), kMinusInfinity);
  std::fill(l.begin(), l.end(), 0.0F);
  std::fill(k_sum.begin(), k_sum.end(), 0.0F);
  std::fill(v_sum.begin(), v_sum.end(), 0.0F);
}

int64_t landmark_pool(const LandmarkPool& pool, int64_t n, const float* k, const float* v,
                      LandmarkPoolState& state, float* kbar, float* vbar) {
  const int64_t d = pool.head_dim;
  check(pool.stride >= 1 && pool.kv_heads >= 1 && d >= 1, "landmark pooling has a positive stride and shape");
  check(state.tokens < pool.stride && static_cast<int64_t>(state.m.size()) == pool.kv_heads &&
            static_cast<int64_t>(state.k_sum.size()) == pool.kv_heads * d,
        "the landmark pooling state has this pool's shape");
  if (n <= 0) return 0;
  std::vector<float> u;  // scaled by d^-1/2
  if (pool.landmark_query != nullptr) {
    u.assign(pool.landmark_query, pool.landmark_query + pool.kv_heads * d);
    for (float& x : u)
      x /= std::sqrt(static_cast<float>(d));
  }
  // Segment s of this call holds tokens [s * stride, (s + 1) * stride) counted from the open segment's first
  // token. Each (segment, head) has its own sums, in the state for the one that was open and the one that
  // stays open, else directly in kbar and vbar.
  const int64_t before = state.tokens, row = pool.kv_heads * d;
  const int64_t completed = (before + n) / pool.stride, segments = (before + n - 1) / pool.stride + 1;
  const LandmarkPoolKernels& kernels = LONGHALO_SIMD(landmark_pool_kernels);
  const auto add_part = [&](int64_t segment, int64_t h, OpenSegment& open) {
    const int64_t begin = std::max<int64_t>(0, segment * pool.stride - before);
    const int64_t end = std::min(n, (segment + 1) * pool.stride - before);
    kernels.add(end - begin, d, row, u.empty() ? nullptr : u.data() + h * d, k + begin * row + h * d,
                v + begin * row + h * d, open);
  };
#pragma omp parallel for collapse(2) if (n > 1)
  for (int64_t segment = 0; segment < completed; ++segment) {
    for (int64_t h = 0; h < pool.kv_heads; ++h) {
      float* to_k = kbar + segment * row + h * d;
      float* to_v = vbar + segment * row + h * d;
      OpenSegment open{kMinusInfinity, 0, to_k, to_v};
      if (segment == 0) {
        open.m = state.m[static_cast<size_t>(h)];
        open.l = state.l[static_cast<size_t>(h)];
        std::copy_n(state.k_sum.data() + h * d, d, to_k);
        std::copy_n(state.v_sum.data() + h * d, d, to_v);
      } else {
        std::fill_n(to_k, d, 0.0F);
        std::fill_n(to_v, d, 0.0F);
      }
      add_part(segment, h, open);
      for (int64_t c = 0; c < d; ++c)
        to_k[c] /= open.l;
      for (int64_t c = 0; c < d; ++c)
        to_v[c] /= open.l;
    }
  }
  if (completed > 0) state.clear();
  if (segments > completed) {
    for (int64_t h = 0; h < pool.kv_heads; ++h) {
      const auto at = static_cast<size_t>(h);
      OpenSegment open{state.m[at], state.l[at], state.k_sum.data() + h * d, state.v_sum.data() + h * d};
      add_part(completed, h, open);
      state.m[at] = open.m;
      state.l[at] = open.l;
    }
  }
  state.tokens = (before + n) % pool.stride;
  return completed;
}

}  // namespace longhalo

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"

namespace longhalo {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// One head's share of the open segment.
struct Open {
  float* m;
  float* l;
  float* k_sum;
  float* v_sum;
};

void add_token(const Open& open, int64_t d, const float* u, float scale, const float* k, const float* v) {
  float score = 0;
  if (u != nullptr) {
#pragma omp simd reduction(+ : score)
    for (int64_t c = 0; c < d; ++c)
      score += u[c] * k[c];
    score *= scale;
  }
  if (score > *open.m) {
    const float shrink = std::exp(*open.m - score);
    *open.l *= shrink;
    for (int64_t c = 0; c < d; ++c)
      open.k_sum[c] *= shrink;
    for (int64_t c = 0; c < d; ++c)
      open.v_sum[c] *= shrink;
    *open.m = score;
  }
  const float weight = std::exp(score - *open.m);
  *open.l += weight;
  for (int64_t c = 0; c < d; ++c)
    open.k_sum[c] += weight * k[c];
  for (int64_t c = 0; c < d; ++c)
    open.v_sum[c] += weight * v[c];
}

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
  const float scale = 1.0F / std::sqrt(static_cast<float>(d));
  int64_t completed = 0;
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t h = 0; h < pool.kv_heads; ++h) {
      const Open open{&state.m[static_cast<size_t>(h)], &state.l[static_cast<size_t>(h)],
                      state.k_sum.data() + h * d, state.v_sum.data() + h * d};
      const float* u = pool.landmark_query != nullptr ? pool.landmark_query + h * d : nullptr;
      add_token(open, d, u, scale, k + (j * pool.kv_heads + h) * d, v + (j * pool.kv_heads + h) * d);
    }
    if (++state.tokens < pool.stride) continue;
    for (int64_t h = 0; h < pool.kv_heads; ++h) {
      for (int64_t c = 0; c < d; ++c) {
        const int64_t to = (completed * pool.kv_heads + h) * d + c;
        const auto from = static_cast<size_t>(h * d + c);
        kbar[to] = state.k_sum[from] / state.l[static_cast<size_t>(h)];
        vbar[to] = state.v_sum[from] / state.l[static_cast<size_t>(h)];
      }
    }
    ++completed;
    state.clear();
  }
  return completed;
}

}  // namespace longhalo

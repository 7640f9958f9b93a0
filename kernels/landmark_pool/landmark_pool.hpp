// Landmark pooling: each complete segment of `stride` tokens becomes one summary key and value a KV head.
//
// For segment g and KV head h:  a = softmax_j(u_h . k_j / sqrt(d)) over the segment's tokens,
// kbar = sum a_j k_j,  vbar = sum a_j v_j,  with k BEFORE the rotary embedding. u = 0 is a mean.
// The caller then rotates kbar at the segment's centre, g*stride + (stride - 1) / 2.
// Works online: tokens may come in any portions, one at a time in generation; the open segment's state is
// small.
#pragma once

#include <cstdint>
#include <vector>

namespace longhalo {

/// The open (incomplete) segment: running maximum m, sum l and weighted sums for each KV head.
struct LandmarkPoolState {
  LandmarkPoolState() = default;
  LandmarkPoolState(int64_t kv_heads, int64_t head_dim);
  void clear();  // an empty open segment

  int64_t tokens = 0;        // tokens in the open segment so far
  std::vector<float> m, l;   // [H_kv]
  std::vector<float> k_sum;  // [H_kv, d]
  std::vector<float> v_sum;  // [H_kv, d]
};

struct LandmarkPool {
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t stride = 0;
  const float* landmark_query = nullptr;  // u [H_kv, d], or nullptr for 0
};

/// Feeds n tokens, k and v [n, H_kv, d], to the open segment; writes each segment that completes to the next
/// row of kbar and vbar [completed, H_kv, d] (room for (state.tokens + n) / stride rows). Returns how many
/// completed. The result does not depend on the portions in which tokens come, up to fp32 rounding.
int64_t landmark_pool(const LandmarkPool& pool, int64_t n, const float* k, const float* v,
                      LandmarkPoolState& state, float* kbar, float* vbar);

/// The definition in fp64 over a whole sequence: kbar, vbar [n / stride, H_kv, d]. u may be nullptr.
void landmark_pool_reference(int64_t n, int64_t kv_heads, int64_t head_dim, int64_t stride, const double* u,
                             const double* k, const double* v, double* kbar, double* vbar);

/// The gradient of pooling whole segments (training: no segment is open before the first token). k and v
/// [n, H_kv, d] as landmark_pool() got them, all in one call; d_kbar (of kbar BEFORE its rotation) and d_vbar
/// [n / stride, H_kv, d]. With g_j = d_kbar . k_j + d_vbar . v_j and ds_j = a_j (g_j - sum a g):
///     dk_j += a_j d_kbar + ds_j u / sqrt(d),   dv_j += a_j d_vbar,   d_landmark_query += sum ds_j k_j /
///     sqrt(d)
/// All three are ADDED into; tokens behind the last whole segment get nothing. d_landmark_query [H_kv, d] may
/// be nullptr; when it is not, it is right for u = nullptr (which is u = 0) too. Bitwise the same for any
/// number of threads. Temporary memory: one number for each of d_kbar's, and 2 * stride a thread.
void landmark_pool_backward(const LandmarkPool& pool, int64_t n, const float* k, const float* v,
                            const float* d_kbar, const float* d_vbar, float* dk, float* dv,
                            float* d_landmark_query);
void landmark_pool_backward_reference(int64_t n, int64_t kv_heads, int64_t head_dim, int64_t stride,
                                      const double* u, const double* k, const double* v, const double* d_kbar,
                                      const double* d_vbar, double* dk, double* dv, double* d_u);

}  // namespace longhalo

// What prefill (rotate_and_pool.cu) and decode (append_keys.cu) share: how the state of an open segment lies
// in memory, and how a finished segment becomes a landmark.
#pragma once

#include "core/error.hpp"
#include "kernels/attention/bands.hpp"
#include "kernels/common/rotation.cuh"
#include "kernels/landmark_pool/rotate_and_pool.hpp"

namespace longhalo {

/// PoolTarget without the host's span around it, and what a segment's landmark needs.
struct PoolBand {
  int64_t stride;
  const float* landmark_query;
  BFloat16* landmarks;
  int64_t first_row;
  float* open;
  float* lse;
};

inline PoolBand pool_band(const PoolTarget& target) {
  return {target.stride, target.landmark_query, target.landmarks, target.first_row, target.open, target.lse};
}

/// What must hold of the sizes of every pooling call. Throws InvariantError.
inline void check_pool_shape(const RotateAndPool& keys) {
  check(keys.kv_heads > 0 && keys.kv_heads <= 4096, "there are 1 to 4096 KV heads");
  check(keys.head_dim == 16 || keys.head_dim == 32 || keys.head_dim == 64 || keys.head_dim == 128 ||
            keys.head_dim == 256,
        "the head dimension of pooling on the GPU is 16, 32, 64, 128 or 256");
  check(keys.bands.size() <= static_cast<size_t>(kMaxBands), "at most 4 bands are pooled");
  for (const PoolTarget& target : keys.bands)
    check(target.stride >= 1, "a pooled band has a stride");
}

/// And of the arrays of a call that pools.
inline void check_pool_arrays(const RotateAndPool& keys) {
  check_pool_shape(keys);
  for (const PoolTarget& target : keys.bands)
    check(target.open != nullptr, "a pooled band has an open state");
}

/// One head's part of an open state (rotate_and_pool.hpp gives the order): k sums at [0, d), v sums at [v, v
/// + d).
struct OpenHead {
  float* m;
  float* l;
  float* k_sum;
  float* v_sum;
};

__device__ inline OpenHead open_head(float* open, int head, int kv_heads, int head_dim) {
  float* sums = open + 2 * kv_heads;
  return {open + head, open + kv_heads + head, sums + head * head_dim, sums + (kv_heads + head) * head_dim};
}

/// Eight pairs of a head's key, c and c + d/2, and the same columns of its value: k's first and second, v's
/// first and second. `at` is k's first, `to_v` the distance from k to v.
__device__ inline void load_token(const BFloat16* at, int half, int64_t to_v, Bf16x8 (&raw)[4]) {
  raw[0] = load_vector(at);
  raw[1] = load_vector(at + half);
  raw[2] = load_vector(at + to_v);
  raw[3] = load_vector(at + to_v + half);
}

/// Writes one head of segment `segment`'s landmark. Called by all 2 * d threads of a block, thread c with
/// column c of [k mean, v mean] (d each) in `mean`; the key is turned at the segment's centre. `exchange` [d]
/// is shared.
__device__ inline void write_landmark(const PoolBand& band, int64_t segment, int head, int kv_heads,
                                      int head_dim, const double* frequencies, float mean, float* exchange) {
  const int column = static_cast<int>(threadIdx.x), half = head_dim / 2;
  const bool is_key = column < head_dim;
  __syncthreads();  // `exchange` may still be read for the segment before
  if (is_key) exchange[column] = mean;
  __syncthreads();
  BFloat16* row = band.landmarks + (segment - band.first_row) * 2 * kv_heads * head_dim;
  if (!is_key) {
    row[(kv_heads + head) * head_dim + column - head_dim] = to_bfloat16_device(mean);
    return;
  }
  const int pair = column % half;
  const double centre =
      static_cast<double>(segment * band.stride) + static_cast<double>(band.stride - 1) * 0.5;
  const float2 turn = turn_of(centre, frequencies[pair]);
  const float other = exchange[column < half ? column + half : column - half];
  const float turned = column < half ? mean * turn.x - other * turn.y : mean * turn.x + other * turn.y;
  row[head * head_dim + column] = to_bfloat16_device(turned);
}

}  // namespace longhalo

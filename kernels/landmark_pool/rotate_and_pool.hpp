// Keys and values of tokens on the GPU, from the projection to what attention reads: landmarks are pooled
// over k BEFORE the rotary embedding and rotated at their segments' centres, k is rotated in place; one read
// of k and v for both (landmark_pool.hpp and rotary.hpp have the definitions).
//
// A row of keys and values is [2, H_kv, d]: all keys of a token, then all its values, so that one message
// carries a halo. Landmark rows look the same.
#pragma once

#include <cstdint>
#include <span>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"

namespace longhalo {

/// Floats of the pooling state of one open segment: m [H_kv], l [H_kv], k_sum [H_kv, d], v_sum [H_kv, d].
inline int64_t pool_state_floats(int64_t kv_heads, int64_t head_dim) {
  return 2 * kv_heads * (1 + head_dim);
}

/// One strided band: where its landmarks go, all in device memory.
struct PoolTarget {
  int64_t stride = 0;                     // tokens a segment
  const float* landmark_query = nullptr;  // u [H_kv, d], or nullptr for 0
  BFloat16* landmarks = nullptr;          // rows [2, H_kv, d]
  int64_t first_row = 0;                  // the global segment that row 0 of landmarks stands for
  float* open = nullptr;                  // [pool_state_floats] the open segment's state
  float* lse = nullptr;  // [rows of landmarks, H_kv] where prefill leaves the logarithm of the
                         // sum of exp(u . k / sqrt(d)) for the gradient; nullptr: not wanted
};

struct RotateAndPool {
  int64_t kv_heads = 0;
  int64_t head_dim = 0;                 // 16, 32, 64, 128 or 256
  const double* frequencies = nullptr;  // [d/2]
  std::span<const PoolTarget> bands;    // at most kMaxBands; host memory
};

/// GPU, prefill: n tokens from `first_token` on, which is a multiple of every stride. kv [n, 2, H_kv, d], k
/// before rotary, 16-byte aligned; k is rotated in place, each complete segment's landmark is written, and
/// the state of the segment that stays open (of zero tokens perhaps) replaces `open`. Deterministic: a
/// landmark has the same bits wherever a call begins. `workspace`: rotate_and_pool_workspace() bytes, 16-byte
/// aligned, at most about 70 MB for 8 KV heads of 128. Bytes for the first band: 6 * n * H_kv * d (k and v
/// read, k written); each further band reads k and v once more.
void rotate_and_pool(StreamHandle stream, const RotateAndPool& keys, int64_t n, int64_t first_token,
                     BFloat16* kv, void* workspace);
int64_t rotate_and_pool_workspace(const RotateAndPool& keys, int64_t n);

/// GPU, decode: n tokens from *position (device memory, read when the kernel runs) on. new_kv [n, 2, H_kv, d]
/// is fed to the open segments, whose landmarks are written as they complete, rotated, and copied to rows
/// *position - first_row .. of `rows`. For n of a few tokens up to a tile. One launch whose grid depends on n
/// alone, so that a captured graph serves every position; where segments end is decided on the device.
void append_keys(StreamHandle stream, const RotateAndPool& keys, int64_t n, const int64_t* position,
                 const BFloat16* new_kv, BFloat16* rows, int64_t first_row);

/// The gradient of one strided band's landmarks. Row 0 of every array is segment first_token / stride.
struct PoolGradient {
  int64_t stride = 0;
  const float* landmark_query = nullptr;  // u [H_kv, d], or nullptr for 0
  const BFloat16* landmarks = nullptr;    // rows [2, H_kv, d] as rotate_and_pool() left them
  const float* lse = nullptr;             // [n / stride, H_kv], too
  float* d_landmarks = nullptr;           // rows [2, H_kv, d]: the gradient of `landmarks`, used up
  float* d_landmark_query = nullptr;      // [H_kv, d] ADDED into, or nullptr when not wanted
};

struct RotateAndPoolBackward {
  int64_t kv_heads = 0;
  int64_t head_dim = 0;                 // 16, 32, 64, 128 or 256
  const double* frequencies = nullptr;  // [d/2]
  std::span<const PoolGradient> bands;  // at most kMaxBands; host memory
};

/// GPU: from the gradients of what attention reads to that of the projection, landmark_pool_backward() and
/// the rotary embedding's in one pass. kv [n, 2, H_kv, d] as rotate_and_pool() left it, k rotated, and its
/// gradient d_rotated [n, 2, H_kv, d] without the landmarks' part; d_kv [n, 2, H_kv, d] overwritten: the
/// gradient of k before the rotary embedding, and of v. first_token is a multiple of every stride; tokens
/// behind the last whole segment have no landmark. Deterministic. NOTE: sum a g is taken as d_kbar . kbar +
/// d_vbar . vbar from the landmarks in bf16, and k is turned back from bf16. `workspace`:
/// rotate_and_pool_backward_workspace() bytes. Bytes: 32 * n * H_kv * d.
void rotate_and_pool_backward(StreamHandle stream, const RotateAndPoolBackward& keys, int64_t n,
                              int64_t first_token, const BFloat16* kv, const float* d_rotated, BFloat16* d_kv,
                              void* workspace);
int64_t rotate_and_pool_backward_workspace(const RotateAndPoolBackward& keys, int64_t n);

}  // namespace longhalo

// The GPU kernels behind attention_forward(stream, ...) and attention_backward(stream, ...), one file each.
// The caller has checked the problem.
#pragma once

#include "kernels/attention/attention.hpp"
#include "kernels/attention/attention_backward.hpp"

namespace longhalo {

/// sm_90a: TMA, mbarriers, wgmma (attention_hopper.cu).
void attention_hopper(StreamHandle stream, const Attention<BFloat16>& problem);
/// sm_80 and later: cp.async, mma.sync (attention_portable.cu).
void attention_portable(StreamHandle stream, const Attention<BFloat16>& problem);
/// sm_80 and later, at most kGpuDecodeQueries queries: split over keys, merged by lse
/// (attention_gpu_decode.cu).
void attention_gpu_decode(StreamHandle stream, const Attention<BFloat16>& problem);

// ---- The gradient. Workspaces are 16-byte aligned device memory; all sums have a fixed order.

/// Rows of a head in the arrays that attention_backward_rows() makes: n rounded up to whole tiles of 128.
constexpr int64_t attention_backward_padded(int64_t queries) {
  return (queries + 127) / 128 * 128;
}

/// Before every variant (attention_backward_rows.cu): for each row lse in units of log2, and D = out . d_out,
/// both [H, attention_backward_padded(n)]. A row that sees nothing, and every row behind the last, has lse
/// +infinity, so that exp2(score - lse) is 0, and D 0, whatever stands in its d_out.
void attention_backward_rows(StreamHandle stream, const AttentionGradient<BFloat16>& gradient,
                             float* lse_log2, float* delta);

/// sm_80 and later: dk and dv of all bands (attention_backward_keys.cu). `workspace`:
/// attention_backward_keys_floats().
void attention_backward_keys(StreamHandle stream, const AttentionGradient<BFloat16>& gradient,
                             const float* lse_log2, const float* delta, float* workspace);
int64_t attention_backward_keys_floats(const Attention<BFloat16>& problem);

/// sm_80 and later: dq and the landmark bias (attention_backward_queries.cu). `workspace`:
/// attention_backward_queries_floats().
void attention_backward_queries(StreamHandle stream, const AttentionGradient<BFloat16>& gradient,
                                const float* lse_log2, const float* delta, float* workspace);
int64_t attention_backward_queries_floats(const Attention<BFloat16>& problem);

/// sm_90a: everything by one kernel (attention_backward_hopper.cu); dq is summed in any order. `workspace`:
/// attention_backward_hopper_floats().
void attention_backward_hopper(StreamHandle stream, const AttentionGradient<BFloat16>& gradient,
                               const float* lse_log2, const float* delta, float* workspace);
int64_t attention_backward_hopper_floats(const AttentionGradient<BFloat16>& gradient);

/// to[h] += the sum over tiles of partial [tiles, H], in fp64.
void add_bias_partials(StreamHandle stream, const float* partial, int64_t tiles, int64_t heads, float* to);

/// Sums of one band's dk and dv over chunks of the queries.
struct KeyPartials {
  const float* partial;  // [chunks, 2, count, width]: dk, then dv of each chunk
  int64_t chunks, count, width;
  float *dk, *dv;      // [count, width], added into
  int64_t row_stride;  // of dk and dv, in elements: a multiple of 4
};
void add_key_partials(StreamHandle stream, const KeyPartials& partials);

}  // namespace longhalo

// The gradient of attention over bands (attention.hpp): from d_out to dq, to dk and dv of every band, and to
// the landmark bias. One softmax spans all bands, so what forward left, out and lse, is all that is needed to
// make the weights again, key tile by key tile:
//     P = exp(score - lse),   D_i = sum_c out[i,h,c] * d_out[i,h,c]
//     dS = P * (d_out . v - D_i)              (the gradient of a score)
//     dq = scale * sum dS k,   dk = scale * sum dS q,   dv = sum P d_out,
//     d_landmark_bias[h] = sum of dS over all queries and the keys of every band with stride > 1
// where the sums of dk and dv run over queries and the heads of the group. q and k are the rotated ones, and
// dq and dk their gradients. A row with lse = -infinity saw nothing and gives nothing (dq 0), whatever is in
// d_out. Cost: 10 * head_dim FLOPs for each visible (query, key) pair and query head (five products). The
// algorithm without an [n, keys] array: Dao et al., "FlashAttention" (2022), section 3.1 and appendix B.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/attention/attention.hpp"

namespace longhalo {

/// Where the gradients of one band's keys and values go, rows as in its BandKeys. ADDED into: the caller
/// zeroes them once, then halo, own keys and further calls on other queries accumulate.
template <class T>
struct BandGradient {
  Accumulator<T>* dk = nullptr;  // [count, H_kv, d]
  Accumulator<T>* dv = nullptr;  // [count, H_kv, d]
  int64_t row_stride = 0;        // elements from one row to the next of dk and of dv; 0: dense. GPU only
};

template <class T>
struct AttentionGradient {
  Attention<T> forward;      // the problem as forward got it; out and lse (both needed) are read
  const T* d_out = nullptr;  // [n, H, d]

  T* dq = nullptr;                            // [n, H, d] overwritten; must not overlap any input
  std::span<const BandGradient<T>> d_bands;   // one for each of forward.bands
  Accumulator<T>* d_landmark_bias = nullptr;  // [H] added into, or nullptr when not wanted

  void* workspace = nullptr;   // GPU only: attention_backward_workspace() bytes of device memory
  bool deterministic = false;  // GPU only: the same bits on every repeat; the CPU's always are
};

/// The CPU kernel, fp32: tiled over queries and keys, OpenMP over (query tile, KV head). Query tiles add to a
/// key tile in their order, so the result is bitwise the same on every repeat and for every number of
/// threads. Temporary memory is a constant a thread, and a few numbers for each tile of queries and of keys.
/// Works for any number of queries. What stands in keys that no query sees is never used.
void attention_backward(const AttentionGradient<float>& problem);

/// The GPU kernel: bf16 in, dq in bf16, the gradients of keys, values and bias in fp32; head dimension 64 or
/// 128. All pointers are device memory, 16-byte aligned, but the spans themselves; row strides are multiples
/// of 8. Queued on `stream`; the host does not wait. The portable kernel (sm_80 and later) gives the same
/// bits on every repeat, whatever `deterministic` says; the Hopper kernel (compute capability 9.0) adds up dq
/// in any order, or, when deterministic, makes it once more in a fixed one. Keys that no query sees, and
/// d_out of rows that see nothing, may be anything finite. kDecode does not exist.
void attention_backward(StreamHandle stream, const AttentionGradient<BFloat16>& problem,
                        AttentionKernel kernel = AttentionKernel::kAutomatic);
/// Bytes of `workspace`, whatever the kernel: at most 8 * n * H * (d + 2), n rounded up to 128, and for each
/// band 64 MB, or 8 for each element of its keys where that is more.
int64_t attention_backward_workspace(const AttentionGradient<BFloat16>& problem);

/// The formulas above, key by key, in fp64, with the softmax made anew: neither out nor lse is read. Slow;
/// the tests' judge.
void attention_backward_reference(const AttentionGradient<double>& problem);

}  // namespace longhalo

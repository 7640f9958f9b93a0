// The loss of a language model and its gradient in one go: logits = x head^T are made for a tile of rows at a
// time, turned into their own gradient in place and multiplied back, so that [n, V] never exists.
//
// For each row i whose label is not kIgnoredLabel, with l = logits[i]:
//     lse = log sum exp(l),   loss_i = lse - l[label] + z_loss * lse^2
// and d_x, d_head are the gradients of scale * (sum of all loss_i). The z-loss keeps lse near 0 (Chowdhery et
// al., "PaLM" (2022), section 5). With scale = 1 / (labels of the whole batch, all ranks) the loss is their
// mean. Cost: 6 * n * V * D FLOPs (three products), 2 * n * V * D without gradients. All CPU kernels'
// threads.
#pragma once

#include <cstdint>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"

namespace longhalo {

inline constexpr int32_t kIgnoredLabel = -100;

template <class T>
struct CrossEntropy {
  int64_t n = 0;
  int64_t hidden = 0;               // D
  int64_t vocabulary = 0;           // V
  const T* x = nullptr;             // [n, D] normed hidden states
  const T* head = nullptr;          // [V, D]
  const int32_t* labels = nullptr;  // [n] in [0, V), or kIgnoredLabel: the row counts for nothing
  T z_loss = 0;
  T scale = 1;  // of the gradients alone

  T* d_x = nullptr;     // [n, D] ADDED into; nullptr: not wanted
  T* d_head = nullptr;  // [V, D] ADDED into (the tied table's too); nullptr: not wanted
};

/// Sums over the rows that count, not scaled; in nats.
struct CrossEntropySums {
  double loss = 0;    // sum of lse - l[label]
  double z_loss = 0;  // sum of z_loss * lse^2
  int64_t count = 0;
};

/// The CPU kernel, fp32, sums of losses in double. A logit that is not finite makes the sums not finite.
/// Temporary memory: one tile of logits, at most 64 MiB or 64 rows of them. A label out of range is an
/// InvariantError.
CrossEntropySums cross_entropy(const CrossEntropy<float>& problem);

/// The definition in fp64, row by row.
CrossEntropySums cross_entropy_reference(const CrossEntropy<double>& problem);

/// What the GPU adds up, in device memory; the caller sets it to zero first. Rows that count are the
/// caller's to count, for it knows the labels.
struct DeviceLossSums {
  double loss, z_loss;
};

/// GPU: a tile of rows whose logits are made. logits [n, V] in fp32 (DeviceMatmul), labels [n] in device
/// memory, each in [0, V) or kIgnoredLabel (the caller has checked them). d_logits, unless it is nullptr,
/// receives the gradient of scale * (sum of all loss_i) in bf16, rows of `stride` >= V elements, a multiple
/// of 8; behind V, and in rows that do not count, it is 0. 16-byte aligned. The losses are added to `sums` in
/// double and in a fixed order. `workspace`: 8 * n bytes. Bytes: 4 * n * V without gradients, 10 * n * V
/// with.
void cross_entropy_rows(StreamHandle stream, int64_t n, int64_t vocabulary, const float* logits,
                        const int32_t* labels, float z_loss, float scale, BFloat16* d_logits, int64_t stride,
                        DeviceLossSums* sums, void* workspace);

}  // namespace longhalo

// One step of AdamW on the GPU over consecutive parameters: fp32 master weights and moments, and the bf16
// weights that the next forward pass multiplies with. The definition is in model/adamw.hpp; this makes the
// same fp32 operations, but for roundings that fused multiply-adds leave out.
#pragma once

#include <cstdint>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"

namespace longhalo {

struct AdamWStep {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double learning_rate = 0;
  double weight_decay = 0;
  int64_t step = 1;           // 1 is the first
  double gradient_scale = 1;  // what gradients are multiplied with: clipping
};

/// gradients, weights, m, v [n] in fp32; `rounded` [n] receives the new weights in bf16 unless it is nullptr.
/// Arrays need no more alignment than their elements, but are quickest 16-byte aligned. Bytes: 30 * n.
void adamw_step(StreamHandle stream, const AdamWStep& step, int64_t n, const float* gradients, float* weights,
                float* m, float* v, BFloat16* rounded);

}  // namespace longhalo

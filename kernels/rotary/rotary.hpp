// Rotary position embedding, the half-split form of Hugging Face Llama: dimension c is paired with c + d/2
// and turned by position * frequency[c]. Positions are global (never local to a shard) and may be fractional
// (landmark centres).
#pragma once

#include <cstdint>
#include <vector>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"

namespace longhalo {

/// config.json's "rope_scaling" of type llama3 (Llama 3.1): low frequencies are divided by `factor`.
struct Llama3RopeScaling {
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_max_position_embeddings = 8192;
};

/// Radians a token for each of the d/2 pairs: theta^(-2c/d), adjusted by `scaling` unless it is nullptr.
std::vector<double> rotary_frequencies(int64_t head_dim, double theta,
                                       const Llama3RopeScaling* scaling = nullptr);

/// kBackward turns the other way round: a rotation's inverse is its transpose, so it takes the gradient of
/// the rotated x to the gradient of x.
enum class RotaryDirection { kForward, kBackward };

/// Rotates x [n, heads, d] in place; row i stands at position first_position + i * step.
/// Angles are made in double, so that position 10,000,000 is as exact as position 10.
void rotary(int64_t n, int64_t heads, int64_t head_dim, const std::vector<double>& frequencies,
            double first_position, double step, float* x,
            RotaryDirection direction = RotaryDirection::kForward);

/// The definition in fp64.
void rotary_reference(int64_t n, int64_t heads, int64_t head_dim, const std::vector<double>& frequencies,
                      double first_position, double step, double* x,
                      RotaryDirection direction = RotaryDirection::kForward);

/// GPU: x [n, heads, d] in place, row i at x + i * row_stride; d a multiple of 16, x 16-byte aligned,
/// row_stride a multiple of 8. `frequencies` [d/2] in device memory; angles in double, cosines once a token
/// for all heads. When `position` (device memory) is set, it is added to first_position when the kernel runs.
/// In either direction rows are also multiplied with `factor`, before the one rounding to bf16; it costs
/// nothing. Bytes: each element is read once and written once.
void rotary(StreamHandle stream, int64_t n, int64_t heads, int64_t head_dim, const double* frequencies,
            double first_position, double step, BFloat16* x, int64_t row_stride,
            const int64_t* position = nullptr, RotaryDirection direction = RotaryDirection::kForward,
            float factor = 1);

}  // namespace longhalo

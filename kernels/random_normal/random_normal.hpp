// Normally distributed numbers made on the GPU: inputs of benchmarks and random weights, at the speed of
// memory. Not for statistics and not for sampling tokens.
#pragma once

#include <cstdint>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"

namespace longhalo {

/// GPU. out [count], mean 0; out[i] depends on (seed, i) and `deviation` alone. 64-bit hash of a counter
/// (SplitMix64, Steele et al. 2014), then Box and Muller's transform. out 16-byte aligned.
void random_normal(StreamHandle stream, int64_t count, float deviation, uint64_t seed, BFloat16* out);
void random_normal(StreamHandle stream, int64_t count, float deviation, uint64_t seed, float* out);

}  // namespace longhalo

// Normal random numbers made on the device, for models with random weights (`weights: random`).
#pragma once

#include <cstdint>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"

namespace longhalo {

/// GPU. out [count] = scale * normal(0, 1). Element i depends on (seed, stream_id, i) alone: the same on
/// every rank and for every launch. `stream_id` tells tensors of one seed apart. Bytes: 2 * count.
///
/// Pairs by Box and Muller (1958) from the counter-based generator splitmix64 (Steele, Lea, Flood 2014).
void fill_normal(StreamHandle stream, int64_t count, uint64_t seed, uint64_t stream_id, float scale,
                 BFloat16* out);

}  // namespace longhalo

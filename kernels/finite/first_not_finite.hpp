// Where hidden states stop being numbers: asked once after prefill, so that overflow and damaged weights are
// refused by token instead of giving scores that look like results.
#pragma once

#include <cstdint>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"

namespace longhalo {

/// GPU. *first_row (device memory) becomes the lowest row of x [n, D] that holds a value that is not finite
/// or whose sum of squares is not finite in fp32 (the norm could not take it), or n when there is none.
/// hidden a multiple of 8. Bytes: 2 * n * D, read once.
void first_not_finite(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, int64_t* first_row);

}  // namespace longhalo

// The end of sums over many rows that blocks of a GPU kernel made parts of: to[c] += sum over parts, in fp64
// and in a fixed order, whoever finished first.
#pragma once

#include <cstdint>

#include "device/stream_handle.hpp"

namespace longhalo {

/// parts [count, width], to [width], device memory. Bytes: 4 * count * width.
void add_parts(StreamHandle stream, const float* parts, int64_t count, int64_t width, float* to);

}  // namespace longhalo

// Rows of the embedding table by token.
#pragma once

#include <cstdint>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"

namespace longhalo {

/// GPU. x[i] = table[tokens[i]], x [n, D], table [V, D], tokens [n] (device memory) each in [0, V): the
/// caller has checked them. hidden a multiple of 8; table and x 16-byte aligned. Bytes: 4 * n * D.
void embedding(StreamHandle stream, int64_t n, int64_t hidden, const int32_t* tokens, const BFloat16* table,
               BFloat16* x);

}  // namespace longhalo

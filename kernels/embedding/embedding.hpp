// Rows of the embedding table by token, and the gradient of the table.
#pragma once

#include <cstdint>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"

namespace longhalo {

/// GPU. x[i] = table[tokens[i]], x [n, D], table [V, D], tokens [n] (device memory) each in [0, V): the
/// caller has checked them. hidden a multiple of 8; table and x 16-byte aligned. Bytes: 4 * n * D.
void embedding(StreamHandle stream, int64_t n, int64_t hidden, const int32_t* tokens, const BFloat16* table,
               BFloat16* x);

/// The gradient: d_table[tokens[i]] += dx[i] for dx [n, D], d_table [V, D] (ADDED into; with tied embeddings
/// it is the head's gradient too), tokens [n] each in [0, V): the caller has checked them. Each row of the
/// table gets one sum, made in double in the order of its tokens: bitwise the same for any number of threads.
void embedding_backward(int64_t n, int64_t hidden, const int32_t* tokens, const float* dx, float* d_table);

/// GPU: dx [n, D] in bf16, d_table [V, D] in fp32 (ADDED into), tokens [n] in device memory, each in [0, V).
/// Each row of the table gets one sum in fp32, in a fixed order: bitwise the same on every repeat. hidden a
/// multiple of 8; arrays 16-byte aligned. `workspace`: embedding_backward_workspace() bytes, about n * (28 +
/// D / 64). Bytes: 2 * n * D, and 8 * D for each token that occurs.
void embedding_backward(StreamHandle stream, int64_t n, int64_t hidden, int64_t vocabulary,
                        const int32_t* tokens, const BFloat16* dx, float* d_table, void* workspace);
int64_t embedding_backward_workspace(int64_t n, int64_t hidden);

}  // namespace longhalo

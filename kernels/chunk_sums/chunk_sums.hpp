// Sums of hidden states over chunks of neighbouring tokens, for embeddings: tile after tile of a shard is
// added.
#pragma once

#include <cstdint>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"

namespace longhalo {

/// GPU. Adds rows of x [n, D] (already normed) to sums [chunks, D] in double: row i belongs to chunk
/// (first_token + i) / chunk_tokens, where first_token >= 0 counts from the first token of chunk 0. The
/// caller sets `sums` to zero before the first tile; it holds (first_token + n - 1) / chunk_tokens + 1 chunks
/// at least. hidden a multiple of 8. Deterministic for the same tiles. Bytes: 2 * n * D, and 16 * D for each
/// chunk touched.
///
/// A shard that begins inside a chunk: chunk 0 is that chunk, first_token its tokens before the shard.
void add_chunk_sums(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, int64_t first_token,
                    int64_t chunk_tokens, double* sums);

}  // namespace longhalo

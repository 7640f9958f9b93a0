// The ranks' parts of scores and embeddings, put together on rank 0: the same for every device.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/mpi_session.hpp"
#include "comm/shard_plan.hpp"

namespace longhalo {

/// Throws UserError: the hidden state of this token of the sequence is not finite.
[[noreturn]] void refuse_not_finite(int64_t token);

/// The scores of all ranks in rank order, on rank 0; empty elsewhere. Collective.
std::vector<float> gather_scores(const MpiSession& session, const std::vector<float>& part);

/// The embedded tokens of a shard and the chunks that they belong to, [first, first + count).
struct ShardChunks {
  TokenRange tokens;
  int64_t first = 0, count = 0;
  int64_t first_chunk_begin = 0;  // token at which the first chunk begins, perhaps before the shard
};
ShardChunks shard_chunks(const ShardPlan& shards, int rank, int64_t chunk_tokens, int64_t first_token);

/// Means over chunks from the sums of each rank, `sums` [count, D] of its ShardChunks: [chunks, D] on rank 0,
/// empty elsewhere. Sums of a chunk on several ranks are added in rank order. Collective.
std::vector<float> chunk_means(const MpiSession& session, const ShardPlan& shards,
                               const std::vector<double>& sums, int64_t hidden, int64_t chunk_tokens,
                               int64_t first_token);

}  // namespace longhalo

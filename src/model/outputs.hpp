// What is read off a prefilled sequence: the log-probability of every token and a vector for every chunk.
// Logits are only ever made for a few rows at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "comm/mpi_session.hpp"
#include "comm/shard_plan.hpp"
#include "model/weights.hpp"

namespace longhalo {

/// Called with rows done and in all, on this rank.
using RowProgress = std::function<void(int64_t done, int64_t total)>;

/// Throws UserError unless every hidden state of this rank's rows is finite and of a size that the norm
/// before the logits can square in fp32: otherwise scores and answers would look like results and mean
/// nothing. `residual` [n, D] belongs to `shard`. Not collective.
void require_finite(const ModelConfig& config, const TokenRange& shard, const float* residual);

/// Natural log-probability of each token given all before it: out[i] is that of tokens[i], out[0] is 0, for
/// the first token has nothing before it. `residual` [n, D] belongs to this rank's shard; tokens are the
/// whole sequence, so a rank knows the label that follows its last row. All N on rank 0, empty elsewhere.
/// Collective.
std::vector<float> score_tokens(const MpiSession& session, const Weights& weights, const ShardPlan& shards,
                                std::span<const int32_t> tokens, const float* residual,
                                const RowProgress& progress = {});

/// Mean of the final hidden state (after the final norm) over each chunk of `chunk_tokens` tokens, counted
/// from token `first_token` (what stands before it, such as a template's opening, is left out); the last
/// chunk may be short. [chunks, D] on rank 0, empty elsewhere. Independent of the number of ranks up to
/// rounding. Collective.
std::vector<float> embed_chunks(const MpiSession& session, const Weights& weights, const ShardPlan& shards,
                                const float* residual, int64_t chunk_tokens, int64_t first_token = 0);

}  // namespace longhalo

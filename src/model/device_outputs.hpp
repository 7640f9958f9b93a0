// What is read off a sequence prefilled on GPUs: the same as outputs.hpp, with the same results on rank 0.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/mpi_session.hpp"
#include "model/device_prefill.hpp"
#include "model/outputs.hpp"

namespace longhalo {

/// Throws UserError unless every hidden state of this rank's rows is finite. Not collective.
void require_finite(const DevicePrefill& prefill);

/// Collective. `tokens`: the whole sequence.
std::vector<float> score_tokens(const MpiSession& session, DevicePrefill& prefill, const ShardPlan& shards,
                                std::span<const int32_t> tokens, const RowProgress& progress = {});

/// Collective.
std::vector<float> embed_chunks(const MpiSession& session, DevicePrefill& prefill, const ShardPlan& shards,
                                int64_t chunk_tokens, int64_t first_token = 0);

/// Device bytes that scoring and embedding take at most on one rank.
int64_t score_bytes(const ModelConfig& config, const ShardPlan& shards);
int64_t embed_bytes(const ModelConfig& config, const ShardPlan& shards, int64_t chunk_tokens);

}  // namespace longhalo

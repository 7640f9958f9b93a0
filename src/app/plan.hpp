// Memory and time of reading one document, estimated before the work begins.
#pragma once

#include <cstdint>
#include <string>

#include "app/share.hpp"
#include "comm/shard_plan.hpp"
#include "model/attention_pattern.hpp"
#include "model/weights.hpp"

namespace longhalo {

/// FLOPs of a prefill: the layers' matrix products, and attention's two (4 * d * H a visible pair).
struct PrefillFlops {
  double products = 0;
  double attention = 0;
  double total() const { return products + attention; }
};
PrefillFlops prefill_flops(const ModelConfig& config, const AttentionPattern& pattern, int64_t tokens);

/// FLOP/s of large fp32 products of all ranks together, all measuring at once. Collective; takes about a
/// second.
double measured_matmul_rate(const MpiSession& session);

struct JobPlan {
  int64_t tokens = 0;
  int ranks = 1;
  int64_t tokens_per_rank = 0;  // the largest shard
  int64_t bytes_per_rank = 0;   // yet to be allocated
  int64_t available_bytes = 0;  // of this host, for each of its ranks
  double seconds = 0;           // prefill at the measured rate
  std::string pattern;

  std::string describe() const;
  /// Throws UserError when this host's memory will not do.
  void require_memory() const;
};

/// `chunk_tokens`: of the embeddings that `work` asks for.
JobPlan plan_document(const MpiSession& session, const Weights& weights, const AttentionPattern& pattern,
                      const ShardPlan& shards, int64_t tile, double matmul_rate, const Work& work,
                      int64_t chunk_tokens);

}  // namespace longhalo

// Memory and time of reading one document, estimated before the work begins.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/mpi_session.hpp"
#include "comm/shard_plan.hpp"
#include "model/engine.hpp"

namespace longhalo {

/// FLOPs of a prefill: the layers' matrix products, and attention's two (4 * d * H a visible pair).
struct PrefillFlops {
  double products = 0;
  double attention = 0;
  double total() const { return products + attention; }
};
PrefillFlops prefill_flops(const ModelConfig& config, const AttentionPattern& pattern, int64_t tokens);
/// FLOPs of these tokens of a sequence; 0 for none.
double work_of_shard(const ModelConfig& config, const AttentionPattern& pattern, const TokenRange& shard);

/// FLOP/s of large matrix products of all ranks together, all measuring at once. Collective; takes about a
/// second.
MatmulRates measured_matmul_rates(const MpiSession& session, Engine& engine);

/// Seconds of a prefill that computes nothing but its useful products, at those rates.
double products_alone_seconds(const PrefillFlops& flops, const MatmulRates& rates);

struct JobPlan {
  int64_t tokens = 0;
  int ranks = 1;
  int64_t tokens_per_rank = 0;  // the largest shard
  int64_t tile = 0;             // tokens that go through a layer at once
  std::vector<MemoryItem> items;
  int64_t available_bytes = 0;  // to this rank, for all items
  std::string place;            // where this rank's memory is
  double seconds = 0;           // prefill at the measured rates
  std::string pattern;
  std::string remedy;  // what would fit, where this does not

  int64_t bytes() const;
  std::string describe() const;
  /// Throws UserError when the memory will not do.
  void require_memory() const;
};

/// `tile`: tokens that go through a layer at once; 0 takes the engine's default, halved until it fits, down
/// to 1024.
JobPlan plan_document(const MpiSession& session, const Engine& engine, const ShardPlan& shards, int64_t tile,
                      const MatmulRates& rates, const Wanted& wanted);

}  // namespace longhalo

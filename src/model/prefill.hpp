// Reads a whole sequence over all ranks, layer by layer: each rank holds the residual stream of its shard and
// the keys and values of ONE layer. No temporary grows with tokens times window, feed-forward size or
// vocabulary.
//
// A layer:  keys and values of the shard, tile by tile, pooled into landmarks
//           -> start halo exchange and landmark all-gather
//           -> attention and MLP of the interior tiles, whose window lies inside the shard, while the halo
//           flies
//           -> the first tiles, which need the halo
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/halo_exchange.hpp"
#include "comm/landmark_gather.hpp"
#include "comm/mpi_session.hpp"
#include "comm/row_broadcast.hpp"
#include "comm/shard_plan.hpp"
#include "model/attention_pattern.hpp"
#include "model/context.hpp"
#include "model/layer.hpp"
#include "model/prefill_cost.hpp"

namespace longhalo {

/// Shards that give every rank about the same work: the layers' products are alike for all tokens, but
/// attention costs by the keys that a token sees.
ShardPlan plan_shards(const ModelConfig& config, const AttentionPattern& pattern, int64_t tokens, int ranks);

class Prefill {
 public:
  /// One sequence of `shards.tokens()` tokens. All arguments must outlive the prefill.
  Prefill(const MpiSession& session, const Weights& weights, const AttentionPattern& pattern,
          const ShardPlan& shards, int64_t tile);

  /// `tokens`: the whole sequence, on every rank. Collective. Afterwards residual() holds the last layer's
  /// output and, with KeepContext::kYes, the returned context lets every rank go on from the end of the
  /// sequence.
  std::optional<Context> run(std::span<const int32_t> tokens, KeepContext keep,
                             const PrefillProgress& progress = {});

  TokenRange shard() const { return shard_; }
  /// [n, D], before the final norm.
  const float* residual() const { return residual_.data(); }
  const PrefillCost& cost() const { return cost_; }

  /// Bytes that a prefill of these sizes allocates on the rank that owns most, weights and context apart.
  struct Memory {
    int64_t residual = 0;
    int64_t keys = 0;       // and values, of one layer with its halo
    int64_t workspace = 0;  // temporaries of a tile, landmarks
  };
  static Memory memory(const ModelConfig& config, const AttentionPattern& pattern, const ShardPlan& shards,
                       int64_t tile);

 private:
  void run_layer(int64_t layer, Context* context);
  void make_keys(int64_t layer);
  void attend_tiles(int64_t layer, TokenRange queries, TokenRange visible);
  void keep_layer(LayerContext& kept);

  const MpiSession& session_;
  const Weights& weights_;
  AttentionPattern pattern_;
  std::vector<int64_t> strides_;
  const ShardPlan& shards_;
  TokenRange shard_;
  TokenRange context_range_;  // the last tokens, whose keys the context keeps
  Layer layer_;
  HostBuffer<float> residual_;      // [n, D]
  HostBuffer<float> k_, v_;         // [halo + n, H_kv, d], the halo first
  std::vector<KeyRows> landmarks_;  // per strided band, [G, H_kv, d]
  std::vector<LandmarkPoolState> open_;
  HaloExchange halo_;
  std::vector<std::unique_ptr<LandmarkGather>> gathers_;  // per strided band
  RowBroadcast context_rows_;
  bool landmarks_arrived_ = false;
  PrefillCost cost_;
  PrefillProgress progress_;
  int64_t done_ = 0;
};

}  // namespace longhalo

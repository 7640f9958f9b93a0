// Keys and values of ONE layer as a rank needs them in training: its shard's, the halo's before them and the
// landmarks of all ranks, for attention to run over tiles of the shard's queries. Training makes them twice,
// in the forward pass and again in the backward pass, from the layer's input.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/halo_exchange.hpp"
#include "comm/landmark_gather.hpp"
#include "comm/mpi_session.hpp"
#include "comm/shard_plan.hpp"
#include "device/host_buffer.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"
#include "model/attention_pattern.hpp"
#include "model/context.hpp"
#include "model/layer.hpp"

namespace longhalo {

/// Keys and values of one layer, as made and exchanged.
struct LayerKeys {
  HostBuffer<float> k, v;          // [halo + n, H_kv, d]
  std::vector<KeyRows> landmarks;  // per strided band, [G, H_kv, d]
};

class ShardKeys {
 public:
  /// All arguments must outlive the keys. Collective.
  ShardKeys(const MpiSession& session, const ModelConfig& config, const AttentionPattern& pattern,
            const ShardPlan& shards);

  TokenRange shard() const { return shard_; }
  const HaloPlan& plan() const { return halo_.plan(); }
  /// The shard's first tokens, which see into the halo; the others have their whole window in the shard.
  TokenRange boundary() const { return {shard_.begin, interior_begin_}; }
  TokenRange interior() const { return {interior_begin_, shard_.end}; }
  /// Exact keys that the queries of boundary() or interior() may see.
  TokenRange visible(TokenRange queries) const {
    return {queries.begin < interior_begin_ ? plan().halo.begin : shard_.begin, shard_.end};
  }

  /// Memory for the keys of another layer.
  LayerKeys make_layer() const;
  /// Works on the keys in `other` from here on; `other` gets those there were. Only between layers.
  void swap(LayerKeys& other) { std::swap(keys_, other); }

  /// Keys, values and landmarks of the shard from x [n, D], and starts their exchange. Collective.
  void start(Layer& layer, int64_t index, const float* x);
  void poll() { halo_.poll(); }
  /// Waits for the landmarks of all ranks; before the interior's attention.
  void wait_landmarks();
  /// Waits for the halo; before the boundary's attention. Every rank calls both waits once a start().
  void wait_halo() { halo_.wait(); }

  /// For attention of queries to whom `exact` is visible. `exact` and the landmarks as BandKeys of the
  /// pattern.
  std::vector<BandKeys<float>> bands(TokenRange exact) const;

  /// Row of token `token` (halo or own) of the rotated keys, of the values.
  float* k_row(int64_t token) { return keys_.k.data() + (token - plan().halo.begin) * row_; }
  float* v_row(int64_t token) { return keys_.v.data() + (token - plan().halo.begin) * row_; }
  int64_t rows() const { return plan().halo.size() + shard_.size(); }
  int64_t row_elements() const { return row_; }
  int64_t strided_bands() const { return static_cast<int64_t>(gathers_.size()); }
  int64_t segments(int64_t strided_band) const {
    return gathers_[static_cast<size_t>(strided_band)]->segments();
  }
  TokenRange own_segments(int64_t strided_band) const {
    return gathers_[static_cast<size_t>(strided_band)]->own();
  }
  CommCost halo_cost() const { return halo_.cost(); }
  CommCost landmark_cost() const;

 private:
  const AttentionPattern& pattern_;
  std::vector<int64_t> strides_;
  TokenRange shard_;
  int64_t row_;
  HaloExchange halo_;
  int64_t interior_begin_ = 0;
  LayerKeys keys_;
  std::vector<LandmarkPoolState> open_;
  std::vector<std::unique_ptr<LandmarkGather>> gathers_;  // per strided band
};

}  // namespace longhalo

// Keys and values of ONE layer on this rank's GPU as attention over tiles of the shard's queries needs them
// (shard_keys.hpp is their CPU form): the shard's rows with the halo's before them, and the landmarks of all
// ranks. Training makes them twice, forward and again in the backward pass, from the layer's input.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/device_exchange.hpp"
#include "model/device_prefill.hpp"

namespace longhalo {

class DeviceShardKeys {
 public:
  /// All arguments must outlive the keys.
  DeviceShardKeys(const DeviceRoom& room, const ModelConfig& config, const AttentionPattern& pattern,
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

  /// Queues keys, values and landmarks of the shard from x [n, D], and their exchange. Collective.
  void start(DeviceLayer& layer, int64_t index, const BFloat16* x);
  /// Make the compute stream wait for the landmarks of all ranks, for the halo. Both before the next start().
  void wait_landmarks();
  void wait_halo();

  /// For attention of queries to whom `exact` is visible, as BandKeys of the pattern. Landmarks are those up
  /// to this shard's own: no query here sees later ones.
  std::vector<BandKeys<BFloat16>> bands(TokenRange exact) const;

  /// [2, H_kv, d] of token `token`, halo or own.
  const BFloat16* row(int64_t token) const {
    return kv_.data() + (token - plan().halo.begin) * row_elements_;
  }
  int64_t rows() const { return plan().halo.size() + shard_.size(); }
  int64_t row_elements() const { return row_elements_; }
  int64_t strided_bands() const { return static_cast<int64_t>(strides_.size()); }
  int64_t stride(int64_t band) const { return strides_[static_cast<size_t>(band)]; }
  int64_t segments(int64_t band) const { return gathers_[static_cast<size_t>(band)].segments(); }
  TokenRange own_segments(int64_t band) const { return gathers_[static_cast<size_t>(band)].own(); }
  /// Row 0 is segment 0: landmarks [G, 2, H_kv, d], and of this rank's own the sums [G, H_kv] that their
  /// gradient needs.
  const BFloat16* landmarks(int64_t band) const { return landmarks_[static_cast<size_t>(band)].data(); }
  const float* lse(int64_t band) const { return lse_[static_cast<size_t>(band)].data(); }

  /// So far; the device must be past all waits.
  CommCost halo_cost() { return halo_.cost(); }
  CommCost landmark_cost();

 private:
  cudaStream_t compute_, communication_;
  AttentionPattern pattern_;
  std::vector<int64_t> strides_;
  TokenRange shard_;
  int64_t row_elements_;
  DeviceHaloExchange halo_;
  int64_t interior_begin_ = 0;
  std::vector<DeviceLandmarkGather> gathers_;      // per strided band
  DeviceBuffer<BFloat16> kv_;                      // [halo + n, 2, H_kv, d]
  std::vector<DeviceBuffer<BFloat16>> landmarks_;  // per strided band
  std::vector<DeviceBuffer<float>> lse_, open_;    // per strided band
  DeviceBuffer<uint8_t> workspace_;                // of pooling
  bool landmarks_in_flight_ = false, halo_in_flight_ = false;
};

}  // namespace longhalo

// Prefill on GPUs (prefill.hpp), with the same shards, halo and landmarks. Resident are the residual stream
// of the shard in bf16 and the keys and values of ONE layer; all else goes in token tiles.
//
// A layer, on the compute stream:  keys and values of the shard, tile by tile; pooled and rotated in one pass
//           -> an event starts halo exchange and landmark all-gather on the communication stream
//           -> attention and MLP of the interior tiles, whose window lies inside the shard. They see
//           landmarks
//              of earlier ranks: the first tile's queries are made before the gather is waited for
//           -> the first tiles, which need the halo
// The host waits for nothing inside a layer and runs ahead of the device by a bounded number of tiles.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/device_exchange.hpp"
#include "comm/mpi_session.hpp"
#include "comm/shard_plan.hpp"
#include "device/device.hpp"
#include "model/attention_pattern.hpp"
#include "model/device_context.hpp"
#include "model/device_layer.hpp"
#include "model/phase_clock.hpp"
#include "model/prefill_cost.hpp"
#include "model/run_ahead.hpp"

namespace longhalo {

/// What the model's parts on one GPU share. All must outlive them.
struct DeviceRoom {
  Device& device;
  Transport& transport;
  DeviceMatmul& matmul;  // on the device's compute stream
};

class DevicePrefill {
 public:
  /// One sequence of `shards.tokens()` tokens. All arguments must outlive the prefill.
  DevicePrefill(const DeviceRoom& room, const DeviceWeights& weights, const AttentionPattern& pattern,
                const ShardPlan& shards, int64_t tile);

  /// `tokens`: the whole sequence, on every rank, all inside the vocabulary. Collective. Afterwards
  /// residual() holds the last layer's output and, with KeepContext::kYes, the returned context lets every
  /// rank go on from the end of the sequence. The device is done when this returns.
  std::optional<DeviceContext> run(std::span<const int32_t> tokens, KeepContext keep,
                                   const PrefillProgress& progress = {});

  TokenRange shard() const { return shard_; }
  /// [n, D] in device memory, before the final norm.
  const BFloat16* residual() const { return residual_.data(); }
  const PrefillCost& cost() const { return cost_; }
  DeviceLayer& layer() { return layer_; }
  const DeviceLayer& layer() const { return layer_; }

  /// What a prefill of these sizes allocates on the rank that owns most, in bytes.
  struct Memory {
    int64_t residual = 0;
    int64_t keys = 0;       // and values, of one layer with its halo
    int64_t landmarks = 0;  // of one layer; part of the context where that is kept
    int64_t workspace = 0;  // temporaries of a tile, pooling
  };
  static Memory memory(const ModelConfig& config, Precision precision, const AttentionPattern& pattern,
                       const ShardPlan& shards, int64_t tile);

 private:
  void run_layer(int64_t layer, DeviceContext* context);
  void make_keys(int64_t layer, DeviceContext* context);
  void start_messages(int64_t layer, DeviceContext* context);
  void wait_for_landmarks();
  void wait_for_halo();
  void attend_tiles(int64_t layer, TokenRange queries, TokenRange visible,
                    const std::function<void()>& before_attention);

  DeviceRoom room_;
  const DeviceWeights& weights_;
  AttentionPattern pattern_;
  std::vector<int64_t> strides_;
  const ShardPlan& shards_;
  TokenRange shard_;
  TokenRange context_range_;  // the last tokens, whose keys the context keeps
  int64_t row_elements_;      // 2 * H_kv * d
  cudaStream_t compute_, communication_;
  DeviceLayer layer_;
  PhaseClock clock_;
  DeviceBuffer<BFloat16> residual_;  // [n, D]
  DeviceBuffer<BFloat16> kv_;        // [halo + n, 2, H_kv, d], the halo first
  DeviceHaloExchange halo_;
  std::vector<DeviceLandmarkGather> gathers_;  // per strided band
  std::vector<DeviceBuffer<BFloat16>>
      landmarks_;                          // per strided band [G, 2, H_kv, d], unless a context has them
  std::vector<DeviceBuffer<float>> open_;  // per strided band, unless a context has them
  DeviceBuffer<uint8_t> pool_workspace_;
  DeviceRowBroadcast context_rows_;
  std::vector<BFloat16*> landmark_rows_;  // per strided band, where the layer under way has them
  bool landmarks_in_flight_ = false, halo_in_flight_ = false;
  std::optional<RunAhead> run_ahead_;
  PrefillCost cost_;
};

}  // namespace longhalo

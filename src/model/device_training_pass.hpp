// Forward and backward of a whole sequence over the GPUs of all ranks (training_pass.hpp is its CPU form and
// has the order of things): the loss, and the gradients of this rank's tokens with respect to all weights.
//
// Resident are the residual stream and its gradient [n, D] in bf16, the keys and values of ONE layer and
// their gradients in fp32, and the inputs of the layers that are kept; all else goes in token tiles. All is
// queued on the compute stream, messages on the communication stream; the host waits for the loss alone, and
// where the activation store makes it wait.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "model/device_gradient_return.hpp"
#include "model/device_layer_backward.hpp"
#include "model/device_shard_keys.hpp"
#include "model/device_stored_inputs.hpp"
#include "model/training_pass.hpp"

namespace longhalo {

struct DeviceTrainingOptions {
  int64_t tile = 16384;  // tokens that go through a layer at once
  double every = 1;      // which layers' inputs are kept: KeptLayers
  /// Where, device_stored_inputs_shape(); nullptr: in device memory. Must outlive the pass.
  ActivationStore* store = nullptr;
  bool deterministic = true;  // the same bits on every repeat
};

class DeviceTrainingPass {
 public:
  /// Sequences of shards.tokens() tokens. The inputs of layers that are not kept are made again from those
  /// that are in the backward pass, those of a group alive at once. All arguments but the options must
  /// outlive the pass. Collective.
  DeviceTrainingPass(const DeviceRoom& room, const MpiSession& session, const DeviceWeights& weights,
                     DeviceGradients& gradients, const AttentionPattern& pattern, const ShardPlan& shards,
                     const DeviceTrainingOptions& options);

  /// Adds to the gradients: of loss_scale * (sum of cross-entropies and z-losses) over this rank's tokens.
  /// Returns this rank's sums, when the device is done with all of it. Tokens and labels lie in the
  /// vocabulary. Throws JointError where the store fails on a rank. Collective.
  LossSums forward_backward(const TrainingSequence& sequence, double loss_scale, double z_loss,
                            const SectionHooks& hooks = {});
  /// This rank's loss alone. Collective.
  LossSums evaluate(const TrainingSequence& sequence);

  TokenRange shard() const { return keys_.shard(); }
  /// So far, on this rank: forward, loss and backward by the host's clock, which waits for the device between
  /// them; and for which it stood waiting for the store.
  TrainingTimes times();

 private:
  enum class WithGradient { kNo, kYes };

  void upload(const TrainingSequence& sequence);
  void forward(WithGradient with_gradient);
  void run_layer(int64_t index, const BFloat16* x, BFloat16* x_out);
  LossSums loss(const TrainingSequence& sequence, double loss_scale, double z_loss,
                WithGradient with_gradient);
  void backward_group(int64_t slot);
  void backward_layer(int64_t index, const BFloat16* x);
  void attend_back(int64_t index, TokenRange queries, const BFloat16* x);
  void begin_section(int64_t section);
  void end_section(int64_t section);
  double waited_seconds();
  void pool_back(int64_t index, const BFloat16* x);
  void for_tiles(TokenRange range, const std::function<void(int64_t at, int64_t n)>& work) const;
  int64_t row(int64_t token) const { return (token - shard().begin) * weights_.config.hidden; }

  DeviceRoom room_;
  const DeviceWeights& weights_;
  DeviceGradients& gradients_;
  AttentionPattern pattern_;
  int64_t tile_;
  KeptLayers kept_layers_;
  cudaStream_t compute_, communication_;
  DeviceLayer layer_;
  DeviceLayerBackward back_;
  DeviceShardKeys keys_;
  DeviceBuffer<int32_t> tokens_, labels_;   // [n]
  DeviceBuffer<int64_t> doc_start_;         // [n]
  DeviceBuffer<BFloat16> residual_, next_;  // [n, D]
  DeviceBuffer<BFloat16> d_x_, d_normed_;   // [n, D]
  std::unique_ptr<DeviceStoredInputs> stored_;
  std::vector<DeviceBuffer<BFloat16>> kept_;      // [n, D] without a store, inputs of the kept layers
  std::vector<DeviceBuffer<BFloat16>> inputs_;    // [n, D] of the layers of a group, but its first
  DeviceBuffer<float> d_rows_;                    // [halo + n, 2, H_kv, d]
  std::vector<DeviceBuffer<float>> d_landmarks_;  // per strided band [G, 2, H_kv, d]
  DeviceBuffer<BFloat16> d_kv_;                   // [n, 2, H_kv, d]
  DeviceGradientReturn halo_return_;
  std::vector<std::unique_ptr<DeviceGradientReturn>> landmark_returns_;  // per strided band
  DeviceBuffer<uint8_t> workspace_;    // of pooling's gradient and of the embedding's
  DeviceBuffer<DeviceLossSums> sums_;  // [1]
  TrainingTimes times_;
  const SectionHooks* hooks_ = nullptr;  // of the backward pass that is going on
};

}  // namespace longhalo

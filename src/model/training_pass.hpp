// Forward and backward of a whole sequence over all ranks: the loss, and the gradients of this rank's tokens
// with respect to all weights. The optimizer adds the gradients of the ranks.
//
//   forward    layer by layer over the whole shard, keeping what backward needs (Checkpointing)
//   loss       final norm, logits and cross-entropy, forward and backward together, a few rows at a time
//   backward   layer by layer from the last: the layer's tiles go back, gradients of the halo's keys and of
//   the
//              landmarks return to their owners while other tiles are computed
//
// With checkpointing, a layer's keys are made and exchanged again from its input, and its tiles go forward
// again before they go back. All ways give the same numbers to the last bit.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/gradient_return.hpp"
#include "comm/mpi_session.hpp"
#include "comm/shard_plan.hpp"
#include "model/attention_pattern.hpp"
#include "model/layer.hpp"
#include "model/layer_activations.hpp"
#include "model/layer_backward.hpp"
#include "model/shard_keys.hpp"
#include "model/stored_inputs.hpp"
#include "model/training_sequence.hpp"

namespace longhalo {

/// Sums over the tokens that have a label, in nats. Of one rank, or of all.
struct LossSums {
  double cross_entropy = 0;
  double z = 0;  // z-loss, weighted
  int64_t tokens = 0;

  LossSums& operator+=(const LossSums& other) {
    cross_entropy += other.cross_entropy;
    z += other.z;
    tokens += other.tokens;
    return *this;
  }
  /// The sums of all ranks, added in rank order: the same numbers on every rank. Collective.
  LossSums over_ranks(const MpiSession& session) const;
};

struct TrainingTimes {
  double forward = 0, loss = 0, backward = 0;  // seconds, communication and recomputation included
  double recompute = 0;                        // of groups of layers from their stored input
  double store = 0;                            // waiting for the activation store
  /// Of forward and loss, less the waits for other ranks and for the store: a slow rank shows here. In
  /// backward all ranks wait for each other's gradients.
  double own = 0;
  CommCost halo, landmarks, returned;
};

/// What the forward pass keeps for the backward pass.
struct Checkpointing {
  /// Keeps the inputs of layers, stored_inputs_shape(). Without a store all that backward needs of every
  /// layer is kept in memory, and nothing is computed again but norms and the MLP's activation.
  ActivationStore* store = nullptr;
  /// The inputs of KeptLayers are stored. In backward those of the layers between are computed again from
  /// them, and those of one group are alive at once; each layer then goes forward once more as it goes back.
  /// In all 2 - 1/every forward passes are made again, 1 with every = 1.
  double every = 1;
};

class TrainingPass {
 public:
  /// Sequences of shards.tokens() tokens. All arguments, and the store, must outlive the pass. Collective.
  TrainingPass(const MpiSession& session, const Weights& weights, Weights& gradients,
               const AttentionPattern& pattern, const ShardPlan& shards, int64_t tile,
               const Checkpointing& checkpointing = {});

  /// What the caller does while backward goes on.
  struct GradientsReady {
    /// The gradients of the first `elements` elements of parameters_of() are final.
    std::function<void(int64_t elements)> ready;
    /// Between pieces of compute, to let messages make progress.
    std::function<void()> poll;
  };

  /// Adds to the gradients: of loss_scale * (sum of cross-entropies and z-losses) over this rank's
  /// tokens. Returns this rank's sums. Functions of `ready` may be empty. Throws JointError where the store
  /// fails on a rank. Collective.
  LossSums forward_backward(const TrainingSequence& sequence, double loss_scale, double z_loss,
                            const GradientsReady& ready);
  /// This rank's loss alone. Collective.
  LossSums evaluate(const TrainingSequence& sequence);

  TokenRange shard() const { return keys_.shard(); }
  const TrainingTimes& times();

 private:
  enum class WithGradient { kNo, kYes };
  // Checkpointing off: a layer as it was in the forward pass.
  struct KeptLayer {
    HostBuffer<float> x;  // [n, D]
    LayerKeys keys;
    LayerActivations values;
  };
  using TileWork = std::function<void(const LayerBackward::Tile& tile, int64_t first)>;

  void embed(const TrainingSequence& sequence, HostBuffer<float>& x) const;
  void forward(const TrainingSequence& sequence, WithGradient with_gradient);
  void forward_keeping(const TrainingSequence& sequence);
  void run_layer(int64_t index, const TrainingSequence& sequence, const float* x, float* x_out);
  LossSums loss(const TrainingSequence& sequence, double loss_scale, double z_loss,
                WithGradient with_gradient);
  void backward_group(int64_t slot, const TrainingSequence& sequence);
  void backward_layer(int64_t index, const TrainingSequence& sequence, const float* x, KeptLayer* kept);
  void attend_back(int64_t index, TokenRange queries, const TrainingSequence& sequence, const float* x,
                   KeptLayer* kept);
  void layer_done(int64_t index);
  void poll();
  double waited_seconds() const;
  void pool_back(int64_t index, const float* x);
  void for_tiles(TokenRange range, const std::function<void(int64_t at, int64_t n)>& work) const;
  void for_layer_tiles(int64_t index, TokenRange queries, const TrainingSequence& sequence, const float* x,
                       const TileWork& work);
  int64_t row(int64_t token) const { return (token - shard().begin) * weights_.config.hidden; }

  const MpiSession& session_;
  const Weights& weights_;
  Weights& gradients_;
  const AttentionPattern& pattern_;
  std::vector<int64_t> strides_;
  int64_t tile_;
  Layer layer_;
  LayerBackward back_;
  ShardKeys keys_;
  HostBuffer<float> residual_;        // [n, D]
  HostBuffer<float> d_x_, d_normed_;  // [n, D]; in the forward pass d_normed_ takes a layer's output
  std::unique_ptr<StoredInputs> stored_;
  std::vector<HostBuffer<float>> inputs_;  // of the layers of a group, [n, D]
  std::vector<KeptLayer> kept_;            // of all layers, without a store
  HostBuffer<float> dk_, dv_;              // [halo + n, H_kv, d]
  struct LandmarkGradient {
    HostBuffer<float> dk, dv;  // [G, H_kv, d]
  };
  std::vector<LandmarkGradient> d_landmarks_;  // per strided band
  KeptLayers stored_layers_;                   // with a store
  GradientReturn halo_return_;
  std::vector<std::unique_ptr<GradientReturn>> landmark_returns_;  // per strided band
  const GradientsReady* ready_ = nullptr;                          // of the backward pass that is going on
  int64_t done_ = 0;                                               // elements
  TrainingTimes times_;
};

}  // namespace longhalo

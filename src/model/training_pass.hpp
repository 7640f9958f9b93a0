// Forward and backward of a whole sequence over all ranks: the loss, and the gradients of this rank's tokens
// with respect to all weights. The optimizer adds the gradients of the ranks.
//
//   forward    layer by layer over the whole shard, keeping each layer's input [n, D]
//   loss       final norm, logits and cross-entropy, forward and backward together, a few rows at a time
//   backward   layer by layer from the last: the layer's keys are made and exchanged again from its input,
//   its
//              tiles go forward and back, gradients of the halo's keys and of the landmarks return to their
//              owners
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
#include "model/layer_backward.hpp"
#include "model/shard_keys.hpp"
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
  double forward = 0, loss = 0, backward = 0;  // seconds, communication included
  CommCost halo, returned;
};

class TrainingPass {
 public:
  /// Sequences of shards.tokens() tokens. All arguments must outlive the pass. Collective.
  TrainingPass(const MpiSession& session, const Weights& weights, Weights& gradients,
               const AttentionPattern& pattern, const ShardPlan& shards, int64_t tile);

  /// Called when the gradients of the first `elements` elements of parameters_of() are final.
  using GradientsReady = std::function<void(int64_t elements)>;

  /// Adds to the gradients: of loss_scale * (sum of cross-entropies and z-losses) over this rank's
  /// tokens. Returns this rank's sums. `ready` may be empty. Collective.
  LossSums forward_backward(const TrainingSequence& sequence, double loss_scale, double z_loss,
                            const GradientsReady& ready);
  /// This rank's loss alone. Collective.
  LossSums evaluate(const TrainingSequence& sequence);

  TokenRange shard() const { return keys_.shard(); }
  const TrainingTimes& times();

 private:
  enum class KeepInputs { kNo, kYes };
  enum class WithGradient { kNo, kYes };
  void forward(const TrainingSequence& sequence, KeepInputs keep);
  LossSums loss(const TrainingSequence& sequence, double loss_scale, double z_loss,
                WithGradient with_gradient);
  void backward_layer(int64_t index, const TrainingSequence& sequence);
  void attend_back(int64_t index, TokenRange queries, const TrainingSequence& sequence, const float* x);
  void pool_back(int64_t index, const float* x);
  void for_tiles(TokenRange range, const std::function<void(int64_t at, int64_t n)>& work) const;
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
  HostBuffer<float> residual_;             // [n, D]
  std::vector<HostBuffer<float>> inputs_;  // of every layer, [n, D]
  HostBuffer<float> d_x_, d_normed_;       // [n, D]
  HostBuffer<float> dk_, dv_;              // [halo + n, H_kv, d]
  struct LandmarkGradient {
    HostBuffer<float> dk, dv;  // [G, H_kv, d]
  };
  std::vector<LandmarkGradient> d_landmarks_;  // per strided band
  GradientReturn halo_return_;
  std::vector<std::unique_ptr<GradientReturn>> landmark_returns_;  // per strided band
  TrainingTimes times_;
};

}  // namespace longhalo

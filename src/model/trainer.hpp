// One training step over all ranks: loss and gradients of some sequences, the sum over ranks, clipping,
// AdamW. What the step says (loss, norm, whether it was skipped) is the same on every rank.
#pragma once

#include <cstdint>
#include <span>

#include "comm/mpi_session.hpp"
#include "comm/shard_plan.hpp"
#include "model/sharded_optimizer.hpp"
#include "model/step_rules.hpp"
#include "model/training_pass.hpp"

namespace longhalo {

struct TrainerOptions {
  AdamWOptions adamw;
  LearningRateSchedule schedule;
  double clip = 1;    // largest norm of the whole gradient; 0: no limit
  double z_loss = 0;  // weight
  Checkpointing checkpointing;
};

/// Seconds of this rank so far.
struct StepTimes {
  TrainingTimes pass;
  double optimizer = 0;  // the end of the gradients' reduction, AdamW, sharing of weights
  CommCost reduction;
};

class Trainer {
 public:
  /// `weights` learn. All arguments must outlive the trainer. Collective.
  Trainer(const MpiSession& session, Weights& weights, const AttentionPattern& pattern,
          const ShardPlan& shards, int64_t tile, const TrainerOptions& options);

  /// Step `number` (1 is the first) on whole sequences of the shard plan's length. Throws JointError where
  /// the activation store fails on a rank. Collective.
  StepResult step(int64_t number, std::span<const TrainingSequence> sequences);
  /// Mean cross-entropy over the counted tokens, nats. Collective.
  double validate(std::span<const TrainingSequence> sequences);

  /// The gradients of the last step's tokens on this rank, before they were summed.
  Weights& gradients() { return gradients_; }
  ShardedOptimizer& optimizer() { return optimizer_; }
  StepTimes times();

 private:
  const MpiSession& session_;
  TrainerOptions options_;
  Weights gradients_;
  TrainingPass pass_;
  ShardedOptimizer optimizer_;
  double optimizer_seconds_ = 0;
};

}  // namespace longhalo

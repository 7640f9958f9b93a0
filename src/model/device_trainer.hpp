// One training step over the GPUs of all ranks (trainer.hpp is its CPU form): loss and gradients of some
// sequences, the sum over ranks, clipping, AdamW. What the step says is the same on every rank.
#pragma once

#include <span>

#include "model/device_optimizer.hpp"
#include "model/device_training_pass.hpp"
#include "model/trainer.hpp"

namespace longhalo {

struct DeviceTrainerOptions {
  AdamWOptions adamw;
  LearningRateSchedule schedule;
  double clip = 1;    // largest norm of the whole gradient; 0: no limit
  double z_loss = 0;  // weight
  DeviceTrainingOptions pass;
};

class DeviceTrainer {
 public:
  /// `weights` learn. All arguments but the options must outlive the trainer. Collective.
  DeviceTrainer(const DeviceRoom& room, const MpiSession& session, DeviceWeights& weights,
                const AttentionPattern& pattern, const ShardPlan& shards,
                const DeviceTrainerOptions& options);

  /// Step `number` (1 is the first) on whole sequences of the shard plan's length. Throws JointError where
  /// the activation store fails on a rank. Collective.
  StepResult step(int64_t number, std::span<const TrainingSequence> sequences);
  /// Mean cross-entropy over the counted tokens, nats. Collective.
  double validate(std::span<const TrainingSequence> sequences);

  DeviceOptimizer& optimizer() { return optimizer_; }
  /// Of this rank so far. Optimizer: the end of the gradients' reduction, their norm, AdamW queued.
  StepTimes times() { return {pass_.times(), optimizer_seconds_, optimizer_.cost()}; }

 private:
  const MpiSession& session_;
  DeviceTrainerOptions options_;
  DeviceGradients gradients_;
  DeviceTrainingPass pass_;
  DeviceOptimizer optimizer_;
  double optimizer_seconds_ = 0;
};

}  // namespace longhalo

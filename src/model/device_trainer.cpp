#include "model/device_trainer.hpp"

#include "core/clock.hpp"
#include "model/device_training_memory.hpp"

namespace longhalo {

DeviceTrainer::DeviceTrainer(const DeviceRoom& room, const MpiSession& session, DeviceWeights& weights,
                             const AttentionPattern& pattern, const ShardPlan& shards,
                             const DeviceTrainerOptions& options)
    : session_(session),
      options_(options),
      gradients_(weights, kGradientLayersAtOnce, room.device.compute()),
      pass_(room, session, weights, gradients_, pattern, shards, options.pass),
      optimizer_(room, session, gradients_, options.adamw) {}

StepResult DeviceTrainer::step(int64_t number, std::span<const TrainingSequence> sequences) {
  StepResult result = begin_result(sequences);
  optimizer_.begin_step();
  LossSums own;
  try {
    for (const TrainingSequence& sequence : sequences)
      own += pass_.forward_backward(sequence, result.scale(), options_.z_loss, optimizer_.hooks());
  } catch (const JointError&) {
    // All ranks are here, at the same layer: gradients that are on their way arrive before their memory goes.
    optimizer_.finish_gradients();
    throw;
  }
  const Stopwatch watch;
  conclude_step(session_, number, own, options_, optimizer_, result);
  optimizer_seconds_ += watch.seconds();
  return result;
}

double DeviceTrainer::validate(std::span<const TrainingSequence> sequences) {
  return mean_cross_entropy(session_, pass_, sequences);
}

}  // namespace longhalo

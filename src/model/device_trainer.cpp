#include "model/device_trainer.hpp"

#include <algorithm>
#include <cmath>

#include "core/clock.hpp"

namespace longhalo {

DeviceTrainer::DeviceTrainer(const DeviceRoom& room, const MpiSession& session, DeviceWeights& weights,
                             const AttentionPattern& pattern, const ShardPlan& shards,
                             const DeviceTrainerOptions& options)
    : session_(session),
      options_(options),
      gradients_(weights, kLayersAtOnce, room.device.compute()),
      pass_(room, session, weights, gradients_, pattern, shards, options.pass),
      optimizer_(room, session, gradients_, options.adamw) {}

StepResult DeviceTrainer::step(int64_t number, std::span<const TrainingSequence> sequences) {
  StepResult result;
  for (const TrainingSequence& sequence : sequences)
    result.counted_tokens += sequence.counted();
  const double scale = result.counted_tokens == 0 ? 0 : 1 / static_cast<double>(result.counted_tokens);
  optimizer_.begin_step();
  LossSums own;
  for (const TrainingSequence& sequence : sequences)
    own += pass_.forward_backward(sequence, scale, options_.z_loss, optimizer_.hooks());
  const Stopwatch watch;
  const LossSums all = own.over_ranks(session_);
  result.cross_entropy = all.cross_entropy * scale;
  result.loss = result.cross_entropy + all.z * scale;
  result.gradient_norm = optimizer_.finish_gradients();
  result.learning_rate = options_.schedule.rate(number);
  // Every rank holds the same two numbers, so all of them decide alike.
  result.skipped = !std::isfinite(result.loss) || !std::isfinite(result.gradient_norm);
  if (!result.skipped) {
    const bool clips = options_.clip > 0 && result.gradient_norm > options_.clip;
    optimizer_.update(result.learning_rate, clips ? options_.clip / result.gradient_norm : 1);
  }
  optimizer_seconds_ += watch.seconds();
  return result;
}

double DeviceTrainer::validate(std::span<const TrainingSequence> sequences) {
  LossSums own;
  for (const TrainingSequence& sequence : sequences)
    own += pass_.evaluate(sequence);
  const LossSums all = own.over_ranks(session_);
  return all.cross_entropy / static_cast<double>(std::max<int64_t>(all.tokens, 1));
}

}  // namespace longhalo

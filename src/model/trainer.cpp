#include "model/trainer.hpp"

#include <algorithm>
#include <cmath>

#include "core/clock.hpp"

namespace longhalo {

Trainer::Trainer(const MpiSession& session, Weights& weights, const AttentionPattern& pattern,
                 const ShardPlan& shards, int64_t tile, const TrainerOptions& options)
    : session_(session),
      options_(options),
      gradients_(zeros_like(weights)),
      pass_(session, weights, gradients_, pattern, shards, tile, options.checkpointing),
      optimizer_(session, weights, gradients_, options.adamw) {}

StepResult Trainer::step(int64_t number, std::span<const TrainingSequence> sequences) {
  StepResult result;
  for (const TrainingSequence& sequence : sequences)
    result.counted_tokens += sequence.counted();
  const double scale = result.counted_tokens == 0 ? 0 : 1 / static_cast<double>(result.counted_tokens);

  for (const Parameter& gradient : optimizer_.gradients())
    std::fill(gradient.values.begin(), gradient.values.end(), 0.0F);
  LossSums own;
  for (size_t i = 0; i < sequences.size(); ++i) {
    // Buckets leave while the last sequence goes backward: before that their gradients are not final.
    TrainingPass::GradientsReady ready;
    if (i + 1 == sequences.size())
      ready = {[this](int64_t elements) { optimizer_.gradients_ready(elements); },
               [this] { optimizer_.poll(); }};
    try {
      own += pass_.forward_backward(sequences[i], scale, options_.z_loss, ready);
    } catch (const JointError&) {
      // All ranks are here, at the same layer: buckets that are on their way arrive before their memory goes.
      optimizer_.finish_gradients();
      throw;
    }
  }

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

double Trainer::validate(std::span<const TrainingSequence> sequences) {
  LossSums own;
  for (const TrainingSequence& sequence : sequences)
    own += pass_.evaluate(sequence);
  const LossSums all = own.over_ranks(session_);
  return all.cross_entropy / static_cast<double>(std::max<int64_t>(all.tokens, 1));
}

StepTimes Trainer::times() {
  return {pass_.times(), optimizer_seconds_, optimizer_.cost()};
}

}  // namespace longhalo

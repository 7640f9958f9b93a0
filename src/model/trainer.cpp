#include "model/trainer.hpp"

#include <algorithm>

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
  StepResult result = begin_result(sequences);

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
      own += pass_.forward_backward(sequences[i], result.scale(), options_.z_loss, ready);
    } catch (const JointError&) {
      // All ranks are here, at the same layer: buckets that are on their way arrive before their memory goes.
      optimizer_.finish_gradients();
      throw;
    }
  }

  const Stopwatch watch;
  conclude_step(session_, number, own, options_, optimizer_, result);
  optimizer_seconds_ += watch.seconds();
  return result;
}

double Trainer::validate(std::span<const TrainingSequence> sequences) {
  return mean_cross_entropy(session_, pass_, sequences);
}

StepTimes Trainer::times() {
  return {pass_.times(), optimizer_seconds_, optimizer_.cost()};
}

}  // namespace longhalo

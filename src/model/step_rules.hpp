// What a training step is on CPU ranks and on GPUs alike: how the loss is a mean, when a step is skipped, how
// clipping scales it. The trainers say where gradients come from.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "model/adamw.hpp"
#include "model/training_pass.hpp"

namespace longhalo {

struct StepResult {
  double loss = 0;           // mean over all counted tokens, z-loss included
  double cross_entropy = 0;  // the same without it, nats a token
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  int64_t counted_tokens = 0;
  bool skipped = false;  // loss or gradient was not finite: weights and moments are as before

  /// What sums over counted tokens are multiplied with.
  double scale() const { return counted_tokens == 0 ? 0 : 1 / static_cast<double>(counted_tokens); }
};

inline StepResult begin_result(std::span<const TrainingSequence> sequences) {
  StepResult result;
  for (const TrainingSequence& sequence : sequences)
    result.counted_tokens += sequence.counted();
  return result;
}

/// The end of step `number`: from this rank's sums and its gradients, all made, to new weights, or none where
/// something is not finite. Collective.
template <class Optimizer, class Options>
void conclude_step(const MpiSession& session, int64_t number, const LossSums& own, const Options& options,
                   Optimizer& optimizer, StepResult& result) {
  const LossSums all = own.over_ranks(session);
  result.cross_entropy = all.cross_entropy * result.scale();
  result.loss = result.cross_entropy + all.z * result.scale();
  result.gradient_norm = optimizer.finish_gradients();
  result.learning_rate = options.schedule.rate(number);
  // Every rank holds the same two numbers, so all of them decide alike.
  result.skipped = !std::isfinite(result.loss) || !std::isfinite(result.gradient_norm);
  if (result.skipped) return;
  const bool clips = options.clip > 0 && result.gradient_norm > options.clip;
  optimizer.update(result.learning_rate, clips ? options.clip / result.gradient_norm : 1);
}

/// Mean cross-entropy over the counted tokens of all ranks, nats. Collective.
template <class Pass>
double mean_cross_entropy(const MpiSession& session, Pass& pass,
                          std::span<const TrainingSequence> sequences) {
  LossSums own;
  for (const TrainingSequence& sequence : sequences)
    own += pass.evaluate(sequence);
  const LossSums all = own.over_ranks(session);
  return all.cross_entropy / static_cast<double>(std::max<int64_t>(all.tokens, 1));
}

}  // namespace longhalo

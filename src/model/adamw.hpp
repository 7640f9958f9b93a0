// AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2) on a stretch of
// parameters in fp32, and the learning rate by step. Pure arithmetic, no MPI: the sharded optimizer calls it
// for what this rank owns.
//     m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//     w = w - rate * ( (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay * w )
#pragma once

#include <cstdint>
#include <span>

namespace longhalo {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;  // of parameters with Decay::kYes
};

/// State of some consecutive parameters; all spans have one length.
struct AdamWState {
  std::span<float> weights, m, v;
};

/// Step number `step` (1 is the first) with gradients `gradient_scale` * gradients.
void adamw_update(const AdamWOptions& options, double learning_rate, double weight_decay, int64_t step,
                  double gradient_scale, std::span<const float> gradients, const AdamWState& state);

enum class ScheduleShape { kCosine, kWarmupStableDecay };

/// The learning rate by step: linear warm-up, then either half a cosine down to `final_rate` at `steps`, or
/// constant and, over the last `decay_steps`, linearly down to `final_rate` (Hu et al., "MiniCPM", 2024).
struct LearningRateSchedule {
  ScheduleShape shape = ScheduleShape::kCosine;
  double peak_rate = 3e-4;
  double final_rate = 3e-5;
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;  // kWarmupStableDecay only
  int64_t steps = 1;

  /// Of step 1 to `steps`; beyond them final_rate.
  double rate(int64_t step) const;
};

}  // namespace longhalo

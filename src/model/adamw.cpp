#include "model/adamw.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.hpp"

namespace longhalo {

void adamw_update(const AdamWOptions& options, double learning_rate, double weight_decay, int64_t step,
                  double gradient_scale, std::span<const float> gradients, const AdamWState& state) {
  const size_t count = gradients.size();
  check(step >= 1 && state.weights.size() == count && state.m.size() == count && state.v.size() == count,
        "an AdamW step has as many weights and moments as gradients");
  const auto t = static_cast<double>(step);
  const auto beta1 = static_cast<float>(options.beta1), beta2 = static_cast<float>(options.beta2);
  const auto new1 = static_cast<float>(1 - options.beta1), new2 = static_cast<float>(1 - options.beta2);
  const auto scale = static_cast<float>(gradient_scale);
  // rate * (m / c1) / (sqrt(v / c2) + epsilon), with the corrections taken out of the loop.
  const double root2 = std::sqrt(1 - std::pow(options.beta2, t));
  const auto rate = static_cast<float>(learning_rate * root2 / (1 - std::pow(options.beta1, t)));
  const auto epsilon = static_cast<float>(options.epsilon * root2);
  const auto keep = static_cast<float>(1 - learning_rate * weight_decay);
  const auto n = static_cast<int64_t>(count);
#pragma omp parallel for schedule(static) if (n > 65536)
  for (int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<size_t>(i);
    const float g = gradients[at] * scale;
    const float m = state.m[at] = beta1 * state.m[at] + new1 * g;
    const float v = state.v[at] = beta2 * state.v[at] + new2 * g * g;
    state.weights[at] = keep * state.weights[at] - rate * m / (std::sqrt(v) + epsilon);
  }
}

double LearningRateSchedule::rate(int64_t step) const {
  if (step <= warmup_steps) return peak_rate * static_cast<double>(step) / static_cast<double>(warmup_steps);
  const int64_t decay = shape == ScheduleShape::kCosine ? steps - warmup_steps : decay_steps;
  const int64_t left = steps - step;
  if (left >= decay) return peak_rate;
  if (left <= 0) return final_rate;
  const double share = static_cast<double>(left) / static_cast<double>(decay);  // 1 at first, 0 at the end
  const double height =
      shape == ScheduleShape::kCosine ? (1 - std::cos(std::numbers::pi * share)) / 2 : share;
  return final_rate + (peak_rate - final_rate) * height;
}

}  // namespace longhalo

#include <cmath>
#include <numbers>

#include "core/error.hpp"
#include "kernels/rotary/rotary.hpp"

namespace longhalo {

std::vector<double> rotary_frequencies(int64_t head_dim, double theta, const Llama3RopeScaling* scaling) {
  check(head_dim > 0 && head_dim % 2 == 0 && theta > 0,
        "rotary has an even head dimension and a positive theta");
  std::vector<double> frequencies(static_cast<size_t>(head_dim / 2));
  for (size_t c = 0; c < frequencies.size(); ++c)
    frequencies[c] = std::pow(theta, -2.0 * static_cast<double>(c) / static_cast<double>(head_dim));
  if (scaling == nullptr) return frequencies;

  // Llama 3.1: wavelengths longer than the trained length / low_freq_factor are stretched by `factor`,
  // shorter than the trained length / high_freq_factor stay, and those between are blended linearly in
  // trained length / wavelength.
  check(scaling->factor > 0 && scaling->high_freq_factor > scaling->low_freq_factor,
        "llama3 rope scaling has a positive factor and high_freq_factor above low_freq_factor");
  for (double& f : frequencies) {
    const double turns = scaling->original_max_position_embeddings * f / (2.0 * std::numbers::pi);
    if (turns >= scaling->high_freq_factor) continue;
    if (turns <= scaling->low_freq_factor) {
      f /= scaling->factor;
      continue;
    }
    const double keep =
        (turns - scaling->low_freq_factor) / (scaling->high_freq_factor - scaling->low_freq_factor);
    f = (1.0 - keep) * f / scaling->factor + keep * f;
  }
  return frequencies;
}

}  // namespace longhalo

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.hpp"
#include "kernels/logits/logits.hpp"
#include "kernels/logits/logits_simd.hpp"

namespace longhalo {
namespace {

struct Choice {
  double weight;
  int64_t token;
};

bool likelier(const Choice& a, const Choice& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
}

struct Crossing {
  size_t index;  // of the choice, in order of likelihood, with which the mass comes above the target
  double mass;   // up to and with it
};

/// Orders the first `count` choices just so far that the one at which their mass, likeliest first, exceeds
/// `target` stands at its place, with the likelier ones before it: a selection by mass, O(count). The last
/// one if none does.
Crossing cross(std::vector<Choice>& choices, size_t count, double target) {
  size_t low = 0, high = count;
  double before = 0;  // mass of [0, low)
  while (high - low > 1) {
    const size_t middle = low + (high - low) / 2;
    const auto begin = choices.begin();
    std::nth_element(begin + static_cast<std::ptrdiff_t>(low), begin + static_cast<std::ptrdiff_t>(middle),
                     begin + static_cast<std::ptrdiff_t>(high), likelier);
    double mass = before;
    for (size_t c = low; c < middle; ++c)
      mass += choices[c].weight;
    if (mass > target) {
      high = middle;
    } else {
      low = middle;
      before = mass;
    }
  }
  return {low, before + choices[low].weight};
}

}  // namespace

void log_sum_exp(int64_t n, int64_t vocabulary, const float* logits, double* out) {
  check(n >= 0 && vocabulary >= 1, "a row of logits is not empty");
  const LogitsKernels& kernels = LONGHALO_SIMD(logits_kernels);
#pragma omp parallel for if (n > 1)
  for (int64_t i = 0; i < n; ++i) {
    const float* row = logits + i * vocabulary;
    const float top = kernels.largest(vocabulary, row);
    const auto top_value = static_cast<double>(top);
    out[i] = std::isfinite(top) ? top_value + std::log(kernels.sum_exp(vocabulary, row, top)) : top_value;
  }
}

int64_t argmax(int64_t vocabulary, const float* logits) {
  check(vocabulary >= 1, "a row of logits is not empty");
  const float top = LONGHALO_SIMD(logits_kernels).largest(vocabulary, logits);
  check(!std::isnan(top), "logits are numbers: NaN was found among them");
  return std::find(logits, logits + vocabulary, top) - logits;
}

int64_t sample_top_p(int64_t vocabulary, const float* logits, double temperature, double top_p,
                     double uniform) {
  check(temperature > 0 && top_p > 0 && top_p <= 1,
        "sampling has a positive temperature and top_p in (0, 1]");
  check(uniform >= 0 && uniform < 1, "sampling takes a number in [0, 1)");
  const auto top = static_cast<double>(logits[argmax(vocabulary, logits)]);
  std::vector<Choice> choices(static_cast<size_t>(vocabulary));
  double total = 0;
  for (size_t c = 0; c < choices.size(); ++c) {
    const double weight = std::exp((static_cast<double>(logits[c]) - top) / temperature);
    choices[c] = {weight, static_cast<int64_t>(c)};
    total += weight;
  }
  // Tokens so unlikely that all of them together hold less than 1 - top_p are never in the nucleus.
  const double too_little = (1 - top_p) * total / static_cast<double>(vocabulary);
  std::erase_if(choices, [&](const Choice& choice) { return choice.weight < too_little; });

  // The nucleus reaches top_p (>=) where a pick exceeds its mass (>): hence the next smaller number.
  const Crossing nucleus = cross(choices, choices.size(), std::nextafter(top_p * total, 0.0));
  return choices[cross(choices, nucleus.index + 1, uniform * nucleus.mass).index].token;
}

}  // namespace longhalo

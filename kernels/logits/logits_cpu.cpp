#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/error.hpp"
#include "kernels/logits/logits.hpp"
#include "kernels/logits/logits_simd.hpp"

namespace longhalo {

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
  std::vector<double> weight(static_cast<size_t>(vocabulary));
  double total = 0;
  for (size_t c = 0; c < weight.size(); ++c)
    total += weight[c] = std::exp((static_cast<double>(logits[c]) - top) / temperature);
  std::vector<int64_t> order(weight.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto likelier = [&](int64_t a, int64_t b) {
    const double wa = weight[static_cast<size_t>(a)], wb = weight[static_cast<size_t>(b)];
    return wa != wb ? wa > wb : a < b;
  };

  // The nucleus is nearly always small: order the likeliest `ordered` tokens, and more only while their mass
  // is short.
  size_t ordered = 0, count = 0;
  double mass = 0;
  while (count < order.size() && mass < top_p * total) {
    if (count == ordered) {
      const size_t next = std::min(order.size(), std::max<size_t>(64, ordered * 8));
      const auto from = order.begin() + static_cast<std::ptrdiff_t>(ordered);
      std::partial_sort(from, order.begin() + static_cast<std::ptrdiff_t>(next), order.end(), likelier);
      ordered = next;
    }
    mass += weight[static_cast<size_t>(order[count++])];
  }
  double passed = 0;
  for (size_t c = 0; c < count; ++c) {
    passed += weight[static_cast<size_t>(order[c])];
    if (uniform * mass < passed) return order[c];
  }
  return order[count - 1];
}

}  // namespace longhalo

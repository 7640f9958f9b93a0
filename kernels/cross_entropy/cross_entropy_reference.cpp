#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.hpp"
#include "kernels/cross_entropy/cross_entropy.hpp"

namespace longhalo {

CrossEntropySums cross_entropy_reference(const CrossEntropy<double>& p) {
  CrossEntropySums sums;
  std::vector<double> logits(static_cast<size_t>(p.vocabulary));
  for (int64_t i = 0; i < p.n; ++i) {
    const int32_t label = p.labels[i];
    if (label == kIgnoredLabel) continue;
    check(label >= 0 && label < p.vocabulary, "labels lie in the vocabulary or are ignored");
    const double* x = p.x + i * p.hidden;
    for (int64_t t = 0; t < p.vocabulary; ++t) {
      double dot = 0;
      for (int64_t c = 0; c < p.hidden; ++c)
        dot += x[c] * p.head[t * p.hidden + c];
      logits[static_cast<size_t>(t)] = dot;
    }
    const double top = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (double l : logits)
      sum += std::exp(l - top);
    const double lse = top + std::log(sum);
    sums.loss += lse - logits[static_cast<size_t>(label)];
    sums.z_loss += p.z_loss * lse * lse;
    ++sums.count;
    for (int64_t t = 0; t < p.vocabulary; ++t) {
      const double probability = std::exp(logits[static_cast<size_t>(t)] - lse);
      const double d_logit = p.scale * (probability * (1 + 2 * p.z_loss * lse) - (t == label ? 1 : 0));
      for (int64_t c = 0; c < p.hidden; ++c) {
        if (p.d_x != nullptr) p.d_x[i * p.hidden + c] += d_logit * p.head[t * p.hidden + c];
        if (p.d_head != nullptr) p.d_head[t * p.hidden + c] += d_logit * x[c];
      }
    }
  }
  return sums;
}

}  // namespace longhalo

// One sequence to train on, as the model takes it: the whole sequence, the same on every rank. Labels were
// shifted before the sequence is cut into shards, so that no rank needs its neighbour's first token.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/cross_entropy/cross_entropy.hpp"

namespace longhalo {

struct TrainingSequence {
  std::span<const int32_t> tokens;  // [N]
  std::span<const int32_t>
      labels;  // [N] the token that follows, or kIgnoredLabel: nothing is asked of this token
  std::span<const int64_t> doc_start;  // [N] position in the sequence at which the token's document begins

  /// Tokens that have a label.
  int64_t counted() const {
    return static_cast<int64_t>(labels.size()) - std::count(labels.begin(), labels.end(), kIgnoredLabel);
  }
};

}  // namespace longhalo

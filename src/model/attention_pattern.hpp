// What the layers attend to, the same in every layer: the bands, and what they ask of shards and halo.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attention/bands.hpp"

namespace longhalo {

struct AttentionPattern {
  std::vector<Band> bands;  // 1 to kMaxBands

  /// Window W, and landmarks of stride S beyond it; S = 0 is the window alone.
  static AttentionPattern window_and_landmarks(int64_t window, int64_t landmark_stride);

  /// Strides of the bands with stride > 1, in order: the bands that have landmarks.
  std::vector<int64_t> strides() const;
  /// How far exact keys reach: a query at i needs exact keys (i - exact_reach, i]. kUnlimited for dense
  /// attention, 0 when no band is exact.
  int64_t exact_reach() const;
  /// "{1, 0, 2048} {256, 2048, inf}"
  std::string describe() const;
};

/// Exact: visible (query, key) pairs of one head over a whole sequence of n tokens.
int64_t sequence_visible_pairs(const AttentionPattern& pattern, int64_t n);

}  // namespace longhalo

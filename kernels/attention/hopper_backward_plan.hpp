// How the Hopper kernel of attention's gradient deals a problem out, on the host: what of each band is seen
// at all, which bands' queries are sliced into blocks, and the workspace.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention_backward.hpp"

namespace longhalo::hopper_backward {

inline constexpr int kKeyTile = 128;
inline constexpr int kQueryTile = 64;
inline constexpr int kConsumers = 2;  // warpgroups of 64 keys
inline constexpr int kConsumerWarps = 4 * kConsumers;

// The part of a band that some query of the problem sees.
struct BandPlan {
  BandKeys<BFloat16> keys;
  BandGradient<BFloat16> to;
  int64_t tiles = 0;
  int64_t whole = 0, whole_end = 0;  // tiles whose queries are all there, of a band with an end
  bool sliced = false;
};

struct Plan {
  std::vector<BandPlan> bands;
  int64_t blocks = 0, block_tiles = 0;  // of queries
  // The workspace in floats, each part a multiple of 4.
  int64_t dq = 0, partials = 0, bias_lines = 0, bias = 0;
  static constexpr int64_t kCounters = 4;
  int64_t floats() const { return dq + partials + bias + kCounters; }
};

Plan plan_of(const AttentionGradient<BFloat16>& gradient);

}  // namespace longhalo::hopper_backward

// What a prefill is asked for besides its residual stream, and what it says of itself: progress and cost. The
// same on the CPU and on the GPU.
#pragma once

#include <cstdint>
#include <functional>

#include "comm/comm_cost.hpp"

namespace longhalo {

enum class KeepContext { kNo, kYes };

/// Called as tiles are done: layer-tokens done and in all, on this rank.
using PrefillProgress = std::function<void(int64_t done, int64_t total)>;

/// Seconds spent in the parts of the layers.
struct LayerTimes {
  double keys = 0;     // norm, K and V products, pooling, rotary
  double queries = 0;  // norm, Q product, rotary
  double attention = 0;
  double mlp = 0;  // output projection, norm, MLP
};

/// What a prefill cost on this rank.
struct PrefillCost {
  double seconds = 0;
  LayerTimes layers;
  CommCost halo, landmarks, context;
  double exposed_seconds() const {
    return halo.exposed_seconds + landmarks.exposed_seconds + context.exposed_seconds;
  }
};

}  // namespace longhalo

// Bytes and FLOPs of a training step, from sizes alone: what a plan is made of before anything is allocated.
// For the CPU's fp32 path (device_training_memory.hpp is the GPU's). Everything is that of the rank with the
// largest share.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "comm/shard_plan.hpp"
#include "model/attention_pattern.hpp"
#include "model/engine.hpp"
#include "model/model_config.hpp"

namespace longhalo {

struct TrainingMemory {
  std::vector<MemoryItem> fixed;       // whatever is kept of the layers
  std::vector<MemoryItem> host_fixed;  // the same beside them in host memory, where the device has its own
  /// Checkpointing off: all that backward needs of all layers; nothing where that is not offered.
  std::optional<int64_t> everything;
  int64_t stored = 0;       // with a store: what it holds, the inputs of every k-th layer
  int64_t layer_input = 0;  // one of them
  int64_t group = 0;        // with a store: inputs that are alive while a group of layers goes backward
  int64_t checkpoint = 0;   // of a job checkpoint on the disk, over all ranks: weights and optimizer's state
  int64_t arriving = 0;     // with a store that is not on the device: inputs on their way back, there

  int64_t fixed_bytes() const;
  int64_t host_bytes() const;
};

/// Elements that training changes: the model's weights, and what landmarks add to them.
int64_t trained_parameters(const ModelConfig& config, const AttentionPattern& pattern);
/// Of a parameter on the disk beside its weight: master weight and two moments.
constexpr int64_t kOptimizerStateBytes = 3 * sizeof(float);

/// The largest shard, the largest with its halo, and the landmarks of all bands.
struct MostOfRanks {
  int64_t tokens = 0, rows = 0, segments = 0;
};
MostOfRanks most_of_ranks(const AttentionPattern& pattern, const ShardPlan& shards);

/// `tile` tokens go through a layer at once; the inputs of KeptLayers are stored.
TrainingMemory training_memory(const ModelConfig& config, const AttentionPattern& pattern,
                               const ShardPlan& shards, int64_t tile, double every);

/// FLOPs of one sequence, forward and backward, over all ranks. Useful: without what is computed again.
struct TrainingFlops {
  double products = 0;        // of the layers' weights and of the head
  double attention = 0;       // visible pairs: 4 * d forward, 10 * d backward, a head
  double products_again = 0;  // recomputation, with activations stored
  double attention_again = 0;

  double useful() const { return products + attention; }
  double all() const { return useful() + products_again + attention_again; }
};

enum class Recompute { kNo, kYes };
TrainingFlops training_flops(const ModelConfig& config, const AttentionPattern& pattern, int64_t tokens,
                             Recompute recompute, double every);

}  // namespace longhalo

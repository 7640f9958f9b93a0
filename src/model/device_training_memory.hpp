// Bytes of a training step on a GPU, from sizes alone (training_memory.hpp is the CPU's): those of
// DeviceTrainer and all that it makes, for the rank with the largest share.
#pragma once

#include "model/training_memory.hpp"

namespace longhalo {

/// Layers whose gradients have memory at once: one while that of the layer before is on its way to its
/// owners.
inline constexpr int64_t kGradientLayersAtOnce = 2;

/// Rows of logits that the loss makes at once, at most `tile`.
int64_t device_loss_rows(const ModelConfig& config, int64_t tile);

TrainingMemory device_training_memory(const ModelConfig& config, const AttentionPattern& pattern,
                                      const ShardPlan& shards, int64_t tile, double every);

}  // namespace longhalo

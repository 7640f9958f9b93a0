// What a training step takes, by item, before anything is allocated; and where the layers' activations go
// (activations.store), decided by what there is. `longhalo train --plan` prints it without running.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/config.hpp"
#include "core/error.hpp"
#include "model/training_memory.hpp"

namespace longhalo {

/// Where the inputs of checkpointed layers are kept; kOff is no checkpointing: all is kept where the rank
/// computes.
enum class ActivationPlace { kOff, kDevice, kHost, kNvme };
std::string_view name_of(ActivationPlace place);

/// What one rank may use: the least of all ranks, where they differ.
struct TrainingBudget {
  int64_t device_bytes = 0;   // where the rank computes; on the CPU the host's memory
  std::string device_place;   // "host node1"
  bool has_own_host = false;  // the device's memory is not the host's
  int64_t host_bytes = 0;     // then: page-locked memory of the host
  int64_t scratch_bytes = 0;  // of the folder for nvme
  std::string scratch;
  int64_t checkpoint_bytes = 0;  // free where job checkpoints go, for all ranks; -1: not known
  std::string checkpoints;       // that folder
  std::string model;             // where the trained model goes
};

/// What is to be trained, and how.
struct TrainingTask {
  ModelConfig shape;
  AttentionPattern pattern;
  int64_t tokens = 0;     // of a sequence
  int64_t sequences = 1;  // of a step
  int ranks = 1;
  int64_t tile = 0;
  ActivationSetting store = ActivationSetting::kAuto;
  double every = 1;
  // On the disk at once, the one being written included; 0 where a step is only measured.
  int64_t checkpoints = 0, models = 0;
};

/// How many job checkpoints a job keeps and writes at once, if no signal asks it for more; and trained
/// models.
int64_t checkpoints_at_once(const Config::Train& train);
int64_t models_at_once(const Config::Train& train);

/// Buffers between the computing rank and the file, in host memory: a layer's input fits where it is not too
/// large, so that neither the forward pass nor the backward pass waits for the disk.
struct DiskBuffers {
  int64_t chunk_bytes = 0;
  int count = 0;
  int threads = 8;  // while one copies and adds up checksums, the others keep the disk busy
  int64_t bytes() const { return chunk_bytes * count; }
};
DiskBuffers disk_buffers(int64_t layer_input_bytes);

struct TrainingPlan {
  TrainingTask task;
  TrainingBudget budget;
  int64_t tokens_per_rank = 0;  // the largest shard
  ActivationPlace place = ActivationPlace::kOff;
  std::string why;                         // this place
  std::vector<MemoryItem> items;           // where the rank computes
  std::vector<MemoryItem> host_items;      // beside them, where the device has memory of its own
  int64_t disk_bytes = 0;                  // of a rank, for activations
  int64_t checkpoint_bytes = 0;            // of one job checkpoint, over all ranks
  int64_t model_bytes = 0;                 // of a trained model: weights alone
  double matmul_rate = 0;                  // FLOP/s of all ranks together, measured
  double seconds = 0;                      // a step's products at that rate
  std::string fault, remedy;               // why it does not fit and what would; empty where it fits
  std::optional<UserError> scratch_fault;  // of a host whose scratch folder is needed and cannot be used

  int64_t bytes() const;
  int64_t host_bytes() const;
  /// The items as a table.
  std::string table() const;
  /// One line for the log.
  std::string describe() const;
  /// Throws UserError when it does not fit, or the scratch folder that it needs cannot be used.
  void require() const;
};

/// What a step takes with these shards, tile and `every`, where the rank computes.
using MemoryOfStep = std::function<TrainingMemory(const ShardPlan& shards, int64_t tile, double every)>;

/// Decides and adds up. `matmul_rate`: FLOP/s of all ranks together. Pure, but for `memory_of`. Throws
/// UserError where activations.store: off is not offered.
TrainingPlan plan_training(const TrainingTask& task, const TrainingBudget& budget,
                           const MemoryOfStep& memory_of, double matmul_rate);

}  // namespace longhalo

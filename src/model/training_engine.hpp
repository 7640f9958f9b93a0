// What a training job asks of a model, whichever device computes it (engine.hpp is the same for reading): one
// a job, made for the CPU (fp32) or for GPUs (bf16, with fp32 master weights).
//
//   engine->memory(shards, tile, every)     before the work: bytes by item
//   engine->load_weights(...)
//   engine->begin(shards, options)
//   engine->step(...), validate(...)
//   engine->snapshot(...), restore(...), model_tensors(...)    to and from files
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/engine.hpp"
#include "model/trainer.hpp"
#include "model/training_memory.hpp"
#include "model/training_snapshot.hpp"

namespace longhalo {

struct TrainingEngineOptions {
  TrainerOptions trainer;  // on a GPU without a store, inputs are kept in its memory
  int64_t tile = 0;        // tokens that go through a layer at once
  /// The same gradients to the last bit on every repeat. The CPU's always are.
  bool deterministic = false;
};

/// A model's tensors where they are, and how the host gets to their bytes, one tensor at a time.
struct ModelTensors {
  ModelArrays arrays;  // which the tensors may point into
  std::vector<NamedTensor> tensors;
  HostBytes host_bytes = bytes_in_place;
};

class TrainingEngine {
 public:
  virtual ~TrainingEngine() = default;
  virtual const ModelConfig& config() const = 0;
  virtual Precision precision() const = 0;
  /// Of this rank: "CPU", or the GPU's name and number.
  virtual std::string device() const = 0;
  /// One sentence: how ranks exchange halos, and why so.
  virtual std::string transport() const = 0;

  /// Tokens that go through a layer at once where nothing else is said.
  virtual int64_t default_tile() const = 0;
  virtual TrainingMemory memory(const ShardPlan& shards, int64_t tile, double every) const = 0;
  /// What memory() may add up to on this rank, and where that is: "GPU 0 (NVIDIA H200) of host node1".
  virtual int64_t available_bytes() const = 0;
  virtual std::string memory_place() const = 0;
  /// Whether that memory is not the host's.
  virtual bool has_own_memory() const = 0;
  /// FLOP/s of large matrix products of this rank, measured for about `seconds`. Not collective.
  virtual double measure_matmul_rate(double seconds) = 0;
  /// What a store of activations has to keep for a shard of so many tokens.
  virtual ActivationShape stored_inputs_shape(int64_t tokens, double every) const = 0;

  /// Loads or makes the weights on this rank; landmark queries, which may learn, are added where there are
  /// none. Throws UserError. Not collective.
  virtual void load_weights(const WeightsRequest& request) = 0;
  /// `shards` and the store of the options must outlive the engine. Collective.
  virtual void begin(const ShardPlan& shards, const TrainingEngineOptions& options) = 0;

  /// As in trainer.hpp. Collective.
  virtual StepResult step(int64_t number, std::span<const TrainingSequence> sequences) = 0;
  virtual double validate(std::span<const TrainingSequence> sequences) = 0;
  virtual StepTimes times() = 0;
  /// Since the engine was made; zeros on the CPU.
  virtual DeviceMemoryUse device_memory() const = 0;
  virtual int64_t updates() const = 0;  // of the weights, so far

  /// What learns, in the order of parameters_of(): the same on every device.
  virtual std::vector<ParameterSize> parameters() = 0;
  /// Copies of this moment for a checkpoint. Throws UserError. Not collective.
  virtual TrainingSnapshot snapshot(const CheckpointWriter& writer) = 0;
  /// Takes up a checkpoint's state after so many updates. Throws UserError on all ranks. Collective.
  virtual void restore(OptimizerStateReader& reader, int64_t updates) = 0;
  /// The type of the weights' matrices, and all of them. Not collective.
  virtual Dtype matrix_type() const = 0;
  virtual ModelTensors model_tensors() = 0;
};

/// `session` must outlive the engine.
std::unique_ptr<TrainingEngine> make_cpu_training_engine(const MpiSession& session, const ModelConfig& config,
                                                         const AttentionPattern& pattern);

}  // namespace longhalo

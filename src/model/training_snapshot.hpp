// What a job checkpoint holds of a training job, and the way back.
//
// The checkpoint is written while the job goes on, so what it reads is copied first: of the weights the files
// that this rank writes, of the optimizer's state what this rank owns (16 bytes a parameter over all ranks).
// The state of bucket i of the gradients' reduction is group "bucket_<i>", so that a job on another number of
// ranks, or with buckets of another size, finds its own elements by their place in the list of all
// parameters.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device/host_buffer.hpp"
#include "model/sharded_optimizer.hpp"
#include "storage/checkpoint_writer.hpp"
#include "storage/optimizer_state.hpp"

namespace longhalo {

/// Weights and optimizer state of one moment; its contents point into it.
class TrainingSnapshot {
 public:
  /// Copies. `writer` says which tensors this rank writes. Throws UserError when there is no memory for it.
  TrainingSnapshot(const Weights& weights, const ShardedOptimizer& optimizer, const CheckpointWriter& writer);

  /// `weights` and `optimizer` of a checkpoint.
  const std::vector<NamedTensor>& weights() const { return tensors_; }
  const std::vector<OptimizerSlice>& optimizer() const { return slices_; }

 private:
  std::vector<std::vector<float>> joined_;
  std::vector<HostBuffer<std::byte>> tensor_bytes_;
  std::vector<NamedTensor> tensors_;
  HostBuffer<float> master_, first_moment_, second_moment_;
  std::vector<OptimizerSlice> slices_;
};

/// Fills the optimizer with the state of any number of ranks after `steps` updates and gives every rank the
/// weights. Throws UserError on all ranks if the state is of another number of parameters. Collective.
void restore_optimizer(const MpiSession& session, OptimizerStateReader& reader, int64_t steps,
                       ShardedOptimizer& optimizer);

/// Tells one list of parameters (names and sizes, in order) from another: 16 hexadecimal digits.
std::string fingerprint_of(const std::vector<Parameter>& parameters);

}  // namespace longhalo

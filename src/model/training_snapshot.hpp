// What a job checkpoint holds of a training job, and the way back.
//
// The checkpoint is written while the job goes on, so what it reads is copied first: of the weights the files
// that this rank writes, of the optimizer's state what this rank owns (12 bytes a parameter over all ranks).
// The state of group i of the optimizer's layout is group "bucket_<i>", so that a job on another number of
// ranks, with groups of another size or on another device finds its own elements by their place in the list
// of all parameters.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/mpi_session.hpp"
#include "device/host_buffer.hpp"
#include "model/optimizer_layout.hpp"
#include "model/parameters.hpp"
#include "model/save_model.hpp"
#include "model/sharded_optimizer.hpp"
#include "storage/checkpoint_writer.hpp"
#include "storage/optimizer_state.hpp"

namespace longhalo {

/// Weights and optimizer state of one moment; its contents point into it.
class TrainingSnapshot {
 public:
  /// Copies. `writer` says which tensors this rank writes. Throws UserError when there is no memory for it.
  TrainingSnapshot(ModelArrays weights, const OptimizerLayout& layout, const OptimizerArrays& state,
                   const CopyBytes& copy, const CheckpointWriter& writer);

  /// `weights` and `optimizer` of a checkpoint.
  const std::vector<NamedTensor>& weights() const { return tensors_; }
  const std::vector<OptimizerSlice>& optimizer() const { return slices_; }

 private:
  ModelArrays arrays_;
  std::vector<NamedTensor> tensors_;
  std::vector<HostBuffer<std::byte>> tensor_bytes_;
  HostBuffer<float> master_, first_moment_, second_moment_;
  std::vector<OptimizerSlice> slices_;
};

/// Bytes of the snapshot on the rank with the largest: its part of the optimizer's state, and all of the
/// files of weights that it writes, which are whole however many ranks there are. `matrices` is their type.
int64_t most_snapshot_bytes(const ModelConfig& config, int64_t strided_bands, Dtype matrices, int ranks,
                            int64_t max_weight_file_bytes = CheckpointOptions{}.max_weight_file_bytes);

/// Fills the arrays with the state of any number of ranks. Throws UserError on all ranks if it is of another
/// number of parameters. Collective.
void read_optimizer_state(const MpiSession& session, OptimizerStateReader& reader,
                          const OptimizerLayout& layout, const OptimizerArrays& state, const CopyBytes& copy);

/// The same of the CPU's trainer.
TrainingSnapshot snapshot_of(const Weights& weights, ShardedOptimizer& optimizer,
                             const CheckpointWriter& writer);
/// Fills the optimizer with the state of any number of ranks after `steps` updates and gives every rank the
/// weights. Throws UserError on all ranks. Collective.
void restore_optimizer(const MpiSession& session, OptimizerStateReader& reader, int64_t steps,
                       ShardedOptimizer& optimizer);

/// A parameter's name and its elements.
using ParameterSize = std::pair<std::string, int64_t>;
std::vector<ParameterSize> sizes_of(const std::vector<Parameter>& parameters);

/// Tells one list of parameters, in order, from another: 16 hexadecimal digits.
std::string fingerprint_of(const std::vector<ParameterSize>& parameters);

}  // namespace longhalo

// AdamW on the GPUs, its state spread over the ranks (sharded_optimizer.hpp is its CPU form and names the
// source): every rank holds all bf16 weights, but fp32 master weights, moments and summed gradients only of
// an equal part of EVERY section (device_parameters.hpp).
//
//   begin_step()        the sums are 0
//   hooks()             for the backward pass of each sequence: a section that is done flies to the owners of
//                       its parts, on the communication stream beside compute, and is added there in rank
//                       order; its memory is free for another layer when that is done
//   finish_gradients()  the norm of the whole gradient
//   update(rate, scale) AdamW on what this rank owns, then every rank gets all new weights
// All sums have a fixed order: the same bits on every repeat.
#pragma once

#include <vector>

#include "comm/mpi_session.hpp"
#include "model/adamw.hpp"
#include "model/device_gradients.hpp"
#include "model/device_prefill.hpp"
#include "model/optimizer_layout.hpp"

namespace longhalo {

class DeviceOptimizer {
 public:
  /// The master weights start as the weights that `gradients` was made for. All arguments but the options
  /// must outlive the optimizer.
  DeviceOptimizer(const DeviceRoom& room, const MpiSession& session, DeviceGradients& gradients,
                  const AdamWOptions& options);

  void begin_step();
  /// For DeviceTrainingPass::forward_backward(); they clear each section before it is added to.
  SectionHooks hooks();
  /// Of the sums over all ranks and sequences since begin_step(): the same number on every rank, not finite
  /// when an element is not. The host waits. Collective.
  double finish_gradients();
  /// One step with the gradients times `gradient_scale`; the weights of all ranks change. Queued; the host
  /// does not wait. Collective.
  void update(double learning_rate, double gradient_scale);

  /// State for job checkpoints; its groups are the sections.
  OptimizerLayout layout() const;
  OptimizerArrays arrays() { return {master_.data(), m_.data(), v_.data()}; }
  const float* sums() const { return sums_.data(); }
  int64_t steps() const { return steps_; }  // updates so far
  /// Bytes of gradients and of weights; it is not timed.
  const CommCost& cost() const { return cost_; }
  /// After the arrays were filled: gives every rank the weights. Collective.
  void restore(int64_t steps);

 private:
  // Elements [begin, end) of a section are `rank`'s.
  ElementRange part(int64_t section, int rank) const;
  void begin(int64_t section);
  void reduce(int64_t section);
  // What this rank owns of a section is in matrices_ and vectors_: all ranks get all of it as weights.
  void share_section(int64_t section);
  // Calls visit(parameter, first element in the section, count, first in this rank's arrays) for the
  // stretches of a section's parameters that this rank owns.
  template <class Visit>
  void for_each_owned(int64_t section, const Visit& visit) const;

  DeviceRoom room_;
  const MpiSession& session_;
  DeviceGradients& gradients_;
  AdamWOptions options_;
  cudaStream_t compute_, communication_;
  std::vector<int64_t> owned_before_;  // [sections + 1] elements of this rank's arrays, parts padded
  std::vector<OwnedElements> owned_;
  DeviceBuffer<float> master_, m_, v_, sums_;  // [owned]
  DeviceBuffer<float> arrived_;                // [ranks - 1, largest part]
  std::vector<Event> ready_, free_;            // [sections] done with compute; its memory may be used again
  DeviceBuffer<BFloat16> matrices_;            // of a section, one after the other
  DeviceBuffer<float> vectors_;
  DeviceBuffer<double> norm_;  // [1]
  DeviceBuffer<uint8_t> norm_workspace_;
  int64_t steps_ = 0;
  CommCost cost_;
};

}  // namespace longhalo

// AdamW whose state is spread over the ranks (ZeRO-1: Rajbhandari et al., "ZeRO", 2020): every rank holds all
// weights, but master weights and moments only of the parts that it owns (bucket_plan.hpp).
//
//   gradients_ready(elements)   as backward is done with the first so many elements: their buckets fly while
//                               it goes on
//   finish_gradients()          the rest; the owner of a part adds the ranks' parts in rank order, so that
//   the
//                               sum is the same on every repeat
//   update(rate, scale)         AdamW on what this rank owns, then every rank gets all new weights
#pragma once

#include <mpi.h>

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "comm/comm_cost.hpp"
#include "comm/mpi_session.hpp"
#include "comm/owned_comm.hpp"
#include "device/host_buffer.hpp"
#include "model/adamw.hpp"
#include "model/bucket_plan.hpp"
#include "model/optimizer_layout.hpp"
#include "model/parameters.hpp"

namespace longhalo {

class ShardedOptimizer {
 public:
  static constexpr int64_t kBucketElements = int64_t{1} << 22;  // 16 MiB in fp32

  /// `weights` and `gradients` (shaped alike, on every rank) must outlive the optimizer. The master weights
  /// start as the weights. Collective.
  ShardedOptimizer(const MpiSession& session, Weights& weights, Weights& gradients,
                   const AdamWOptions& options, int64_t bucket_elements = kBucketElements);
  ~ShardedOptimizer();
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  const std::vector<Parameter>& gradients() const { return gradients_; }
  const std::vector<Parameter>& weights() const { return weights_; }
  int64_t elements() const { return elements_; }

  /// The first `elements` elements of the gradients are final; they must not change before
  /// finish_gradients(). The same calls on every rank, or fewer: only finish_gradients() waits for all.
  void gradients_ready(int64_t elements);
  /// Lets messages make progress.
  void poll();
  /// Afterwards this rank holds the sums over all ranks of what it owns, and `gradients` are free. Returns
  /// the norm of the whole gradient, the same number on every rank; not finite when an element is not.
  /// Collective.
  double finish_gradients();

  /// One step with the gradients times `gradient_scale`; the weights of all ranks change. Collective.
  void update(double learning_rate, double gradient_scale);

  int64_t steps() const { return steps_; }  // updates so far
  const CommCost& cost() const { return cost_; }

  /// State for job checkpoints; its groups are the buckets.
  OptimizerLayout layout() const;
  OptimizerArrays arrays() { return {master_.data(), m_.data(), v_.data()}; }
  std::span<float> master() { return master_.span(); }
  std::span<float> first_moment() { return m_.span(); }
  std::span<float> second_moment() { return v_.span(); }
  /// After the arrays were filled: gives every rank the weights. Collective.
  void restore(int64_t steps);

 private:
  struct Flight {
    int64_t bucket = 0;
    HostBuffer<float> sent;      // the bucket
    HostBuffer<float> received;  // [ranks, part]
    std::vector<MPI_Request> requests;
  };
  void start_bucket(int64_t bucket);
  void land_oldest();
  void share_weights();

  const MpiSession& session_;
  OwnedComm comm_;
  std::vector<Parameter> weights_, gradients_;
  AdamWOptions options_;
  int64_t elements_;
  BucketPlan plan_;
  HostBuffer<float> master_, m_, v_;  // [owned]
  HostBuffer<float> sums_;            // [owned] gradients of all ranks
  std::deque<Flight> flights_;
  int64_t started_ = 0;  // buckets
  double squares_ = 0;   // of sums_ so far
  int64_t steps_ = 0;
  CommCost cost_;
};

}  // namespace longhalo

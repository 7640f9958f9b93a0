// The way back of keys and values that a rank had from others: gradients of halo rows and of landmarks go to
// the ranks that own them, which add them up. The sum is in rank order: an owner's own part first, for keys
// are only seen by its own queries and by those of higher ranks, then the others in ascending order.
// Non-blocking between start() and add().
#pragma once

#include <mpi.h>

#include <vector>

#include "comm/comm_cost.hpp"
#include "comm/halo_exchange.hpp"
#include "comm/halo_plan.hpp"
#include "comm/mpi_session.hpp"
#include "device/host_buffer.hpp"

namespace longhalo {

/// Rows that this rank sends to their owners, and those of its own that others send it, by ascending peer.
struct ReturnPlan {
  std::vector<RowTransfer> sends;
  std::vector<RowTransfer> receives;
};

/// The reverse of a halo exchange.
ReturnPlan halo_return(const HaloPlan& plan);
/// Every rank with tokens has seen the segments of lower ranks; `range`s are segment indices. Pure.
ReturnPlan landmark_return(const ShardPlan& shards, int rank, int64_t stride);

class GradientReturn {
 public:
  /// row_elements = H_kv * d.
  GradientReturn(const MpiSession& session, ReturnPlan plan, int64_t row_elements);
  ~GradientReturn();
  GradientReturn(const GradientReturn&) = delete;
  GradientReturn& operator=(const GradientReturn&) = delete;

  /// `rows`: gradients of keys and values, row 0 is token (or segment) `first`. What is sent must not change
  /// before add().
  void start(const KvRows& rows);
  void poll();
  /// Waits and adds what came to this rank's own rows.
  void add(const KvRows& rows);
  const CommCost& cost() const { return cost_; }

 private:
  const MpiSession& session_;
  ReturnPlan plan_;
  int64_t row_elements_;
  HostBuffer<float> arrived_;  // for each receive: keys' rows, then values' rows
  std::vector<MPI_Request> requests_;
  CommCost cost_;
};

}  // namespace longhalo

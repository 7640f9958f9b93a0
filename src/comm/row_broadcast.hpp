// The context at the end of a prefill: the rows of a token range on EVERY rank, each part broadcast by its
// owner.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <vector>

#include "comm/comm_cost.hpp"
#include "comm/halo_exchange.hpp"
#include "comm/mpi_session.hpp"

namespace longhalo {

class RowBroadcast {
 public:
  /// row_elements = H_kv * d. Every rank passes the same shards and range.
  RowBroadcast(const MpiSession& session, const ShardPlan& shards, TokenRange range, int64_t row_elements);

  /// Copies this rank's part of the range from `own` to `all` and starts broadcasting all parts. Collective.
  /// `all` must not be touched until wait() returns; `own` may be.
  void start(const KvRows& own, const KvRows& all);
  void wait();
  const CommCost& cost() const { return cost_; }

 private:
  const MpiSession& session_;
  std::vector<RowTransfer> parts_;
  int64_t row_elements_;
  std::vector<MPI_Request> requests_;
  CommCost cost_;
};

}  // namespace longhalo

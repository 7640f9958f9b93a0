// Point-to-point exchange of the halo: keys and values of the tokens before a shard, from the ranks that own
// them.
//
// Non-blocking: start() posts everything, poll() lets MPI make progress between pieces of compute, wait()
// ends it. Rows are received in place, in front of the shard's own rows; nothing is packed. Messages over 1
// GiB are split.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <vector>

#include "comm/comm_cost.hpp"
#include "comm/halo_plan.hpp"
#include "comm/mpi_session.hpp"

namespace longhalo {

/// Keys and values of consecutive tokens: row 0 of k and v, each [.., row_elements], is token `first`.
struct KvRows {
  float* k = nullptr;
  float* v = nullptr;
  int64_t first = 0;
};

class HaloExchange {
 public:
  /// row_elements = H_kv * d.
  HaloExchange(const MpiSession& session, HaloPlan plan, int64_t row_elements);
  ~HaloExchange();
  HaloExchange(const HaloExchange&) = delete;
  HaloExchange& operator=(const HaloExchange&) = delete;

  const HaloPlan& plan() const { return plan_; }

  /// `rows` holds halo and shard, [halo | own]. Until wait() returns, the halo must not be read and the shard
  /// not be changed.
  void start(const KvRows& rows);
  void poll();
  void wait();
  const CommCost& cost() const { return cost_; }

 private:
  enum class Direction { kSend, kReceive };
  void post(Direction direction, const RowTransfer& transfer, const KvRows& rows);

  const MpiSession& session_;
  HaloPlan plan_;
  int64_t row_elements_;
  std::vector<MPI_Request> requests_;
  CommCost cost_;
};

}  // namespace longhalo

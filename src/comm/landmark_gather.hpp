// All-gather of landmarks: each rank pools its own segments, then every rank holds all of them. Non-blocking.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <vector>

#include "comm/comm_cost.hpp"
#include "comm/mpi_session.hpp"
#include "comm/shard_plan.hpp"

namespace longhalo {

class LandmarkGather {
 public:
  /// One band of `stride` tokens a segment; row_elements = H_kv * d.
  LandmarkGather(const MpiSession& session, const ShardPlan& shards, int64_t stride, int64_t row_elements);
  ~LandmarkGather();
  LandmarkGather(const LandmarkGather&) = delete;
  LandmarkGather& operator=(const LandmarkGather&) = delete;

  int64_t segments() const { return segments_; }  // G: complete segments of the whole sequence
  TokenRange own() const { return own_; }         // this rank's segments

  /// k and v [G, row_elements]; this rank has filled rows own(). Collective. Untouched until wait() returns.
  void start(float* k, float* v);
  void poll();
  void wait();
  const CommCost& cost() const { return cost_; }

 private:
  const MpiSession& session_;
  TokenRange own_;
  int64_t segments_ = 0;
  int64_t row_elements_ = 0;
  std::vector<int> counts_, displacements_;  // in rows, by rank
  MPI_Datatype row_ = MPI_DATATYPE_NULL;
  MPI_Request requests_[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
  CommCost cost_;
};

}  // namespace longhalo

// The end of a non-blocking exchange on the CPU path: the rank stands still until its messages are through,
// and that time is the exposed one.
#pragma once

#include <mpi.h>

#include <span>

#include "comm/comm_cost.hpp"
#include "comm/mpi_session.hpp"
#include "core/clock.hpp"
#include "core/waiting.hpp"

namespace longhalo {

/// `operation` and `ranks` as for Waiting.
inline void wait_all(std::span<MPI_Request> requests, CommCost& cost, const char* operation,
                     std::span<const int> ranks = {}) {
  const Waiting waiting(operation, ranks);
  const Stopwatch watch;
  check_mpi(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE),
            "MPI_Waitall");
  cost.exposed_seconds += watch.seconds();
}

}  // namespace longhalo

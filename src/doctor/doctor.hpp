// `longhalo doctor`: is this cluster fit for the job that is about to take it for days? Minutes, on the ranks
// that the job will have: how they were started, what must be alike, GPUs, adapters, links between every two
// ranks, disks.
#pragma once

#include "comm/mpi_session.hpp"
#include "config/config.hpp"
#include "core/error.hpp"

namespace longhalo {

/// Prints the report on rank 0 and writes doctor.json. kDone when nothing failed (warnings are no failure),
/// else kUserError, on every rank. Collective.
ExitCode run_doctor(const MpiSession& session, const Config& config);

}  // namespace longhalo

// The config of a job on all its ranks: rank 0 reads it, so that all agree on what it says.
#pragma once

#include "comm/mpi_session.hpp"
#include "command_line/command_line.hpp"
#include "config/config.hpp"

namespace longhalo {

/// Rank 0 reads the config file; the others take its effective values. Throws UserError on all ranks.
/// Collective.
Config shared_config(const MpiSession& session, const CommandLine& command);

/// run.deadline_seconds as this rank sees it, before the ranks can agree: MPI's own start may be what a rank
/// waits for in vain. The default where the config cannot be read, which rank 0 then says.
double deadline_before_start(const CommandLine& command);

}  // namespace longhalo

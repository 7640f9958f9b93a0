// `longhalo infer`: reads documents with a model over all ranks; answers prompts, scores tokens, embeds
// chunks.
#pragma once

#include "comm/mpi_session.hpp"
#include "config/config.hpp"
#include "core/error.hpp"

namespace longhalo {

/// Returns kRequeue when a signal asked it to stop between two documents. Collective. Throws UserError or
/// JointError for bad input.
ExitCode run_infer(const MpiSession& session, const Config& config);

}  // namespace longhalo

// `longhalo infer`: reads documents with a model over all ranks; answers prompts, scores tokens, embeds
// chunks.
#pragma once

#include "comm/mpi_session.hpp"
#include "config/config.hpp"

namespace longhalo {

/// Collective. Throws UserError or JointError for bad input.
void run_infer(const MpiSession& session, const Config& config);

}  // namespace longhalo

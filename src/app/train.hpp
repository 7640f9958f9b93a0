// `longhalo train`: learns on sequences that all ranks share, and leaves a model that transformers opens.
#pragma once

#include "comm/mpi_session.hpp"
#include "config/config.hpp"

namespace longhalo {

/// Trains for train.steps steps; metrics.jsonl, log.jsonl and the model go to output.directory. Throws
/// UserError for bad input, and when loss or gradient are not finite in more than train.most_skipped steps in
/// a row. Collective.
void run_train(const MpiSession& session, const Config& config);

}  // namespace longhalo

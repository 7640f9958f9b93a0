// `longhalo train`: learns on sequences that all ranks share, and leaves a model that transformers opens.
#pragma once

#include "comm/mpi_session.hpp"
#include "config/config.hpp"
#include "core/error.hpp"

namespace longhalo {

/// Trains for train.steps steps, from the newest good checkpoint on with output.if_exists: resume;
/// metrics.jsonl, log.jsonl, checkpoints and the model go to output.directory. Returns kRequeue when a signal
/// asked it to stop and its state is saved. Throws UserError for bad input, and when loss or gradient are not
/// finite in more than train.most_skipped steps in a row. Collective.
ExitCode run_train(const MpiSession& session, const Config& config);

}  // namespace longhalo

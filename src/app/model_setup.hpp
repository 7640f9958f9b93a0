// From the config to what the rooms take: the attention pattern, the model's shape, the threads.
#pragma once

#include "comm/mpi_session.hpp"
#include "config/config.hpp"
#include "model/attention_pattern.hpp"
#include "model/model_config.hpp"
#include "telemetry/progress.hpp"

namespace longhalo {

AttentionPattern attention_pattern(const Config& config);

/// Of the checkpoint's config.json, or of model.shape with weights: random. Throws UserError.
ModelConfig model_shape(const Config& config);

/// Sets the threads of the CPU kernels: run.threads, else OMP_NUM_THREADS, else this rank's share of the
/// cores that it may run on. Returns how many. Collective.
int use_threads(const MpiSession& session, const Config& config);

ProgressOptions progress_options(const MpiSession& session, const Config& config);

}  // namespace longhalo

// From the config to what the rooms take: the attention pattern, the model's shape, the threads.
#pragma once

#include <string>
#include <string_view>

#include "comm/mpi_session.hpp"
#include "config/config.hpp"
#include "model/attention_pattern.hpp"
#include "model/model_config.hpp"
#include "telemetry/progress.hpp"

namespace longhalo {

AttentionPattern attention_pattern(const Config& config);

/// Of the checkpoint's config.json, or of model.shape with weights: random. Throws UserError.
ModelConfig model_shape(const Config& config);

/// The first number of an OMP_NUM_THREADS ("8", or "8,2" with those of nested regions); 0 where it is none,
/// which OpenMP passes by.
int omp_threads(std::string_view value);
/// The value of OMP_NUM_THREADS where run.threads leaves the number of threads to it and it is none; or
/// empty.
std::string unusable_omp_threads(const Config& config);

/// How many threads the CPU kernels of this rank should have: run.threads, else OMP_NUM_THREADS, else its
/// share of the cores that it may run on.
int wanted_threads(const MpiSession& session, const Config& config);
/// Gives them so many, and warns where OMP_NUM_THREADS is no number, or a rank has fewer cores than threads.
/// Returns how many there are. Collective.
int use_threads(const MpiSession& session, const Config& config);

ProgressOptions progress_options(const MpiSession& session, const Config& config);

}  // namespace longhalo

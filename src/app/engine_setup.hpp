// From the config to the engine that computes this job, reading or training: on which device, in which
// precision, with which weights. Past this, nothing in the job knows.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/mpi_session.hpp"
#include "config/config.hpp"
#include "model/engine.hpp"
#include "model/training_engine.hpp"

namespace longhalo {

/// An engine without weights, on the device that run.device names: auto is CUDA where this build has it,
/// every rank sees a GPU and the GPU's kernels take the model, else the CPU; the log says which and why.
/// Throws UserError, on all ranks, for what cannot be had. Collective.
std::unique_ptr<Engine> make_engine(const MpiSession& session, const Config& config, const ModelConfig& shape,
                                    const AttentionPattern& pattern);

/// The same for training, on the CPU in fp32 or on GPUs in bf16. Collective.
std::unique_ptr<TrainingEngine> make_training_engine(const MpiSession& session, const Config& config,
                                                     const ModelConfig& shape,
                                                     const AttentionPattern& pattern);

/// Which weights the config asks for, with landmarks for `pattern`.
WeightsRequest weights_request(const Config& config, const AttentionPattern& pattern);

/// As many tokens as WeightsRequest::calibration has use for; 0: none.
int64_t calibration_tokens(const Engine& engine);

/// Loads or makes the weights; rank 0 shows progress. `calibration`: of WeightsRequest. Collective: a fault
/// of one rank is thrown on all.
void load_weights(const MpiSession& session, const Config& config, Engine& engine,
                  std::vector<int32_t> calibration);

}  // namespace longhalo

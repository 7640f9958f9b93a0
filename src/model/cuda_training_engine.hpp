// The training engine of GPUs; in builds with CUDA only.
#pragma once

#include <memory>

#include "comm/transport_choice.hpp"
#include "device/device.hpp"
#include "model/training_engine.hpp"

namespace longhalo {

/// `device` is this rank's. Throws UserError, on all ranks, when the transport wanted cannot be used or the
/// pattern has several bands of stride 1.
/// Collective. `session` must outlive the engine.
std::unique_ptr<TrainingEngine> make_cuda_training_engine(const MpiSession& session,
                                                          std::unique_ptr<Device> device,
                                                          TransportChoice transport,
                                                          const ModelConfig& config,
                                                          const AttentionPattern& pattern);

}  // namespace longhalo

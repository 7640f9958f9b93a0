// The engine of the GPU path; in builds with CUDA only.
#pragma once

#include <memory>

#include "comm/transport_choice.hpp"
#include "device/device.hpp"
#include "model/engine.hpp"

namespace longhalo {

/// `device` is this rank's; precision kBf16, kFp8 or kInt8. Throws UserError, on all ranks, when the
/// transport wanted cannot be used or a GPU is too old for the precision. Collective. `session` must outlive
/// the engine.
std::unique_ptr<Engine> make_cuda_engine(const MpiSession& session, std::unique_ptr<Device> device,
                                         TransportChoice transport, const ModelConfig& config,
                                         const AttentionPattern& pattern, Precision precision);

}  // namespace longhalo

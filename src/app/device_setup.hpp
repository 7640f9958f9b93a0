// Which device this job computes on: what the config asks for, met with what the hosts have.
//
// All ranks compute on the same kind of device. GPUs go to the ranks of a host in turn, one each; two ranks
// on one GPU is an error unless run.share_gpus says that it is meant.
#pragma once

#include <memory>

#include "comm/mpi_session.hpp"
#include "comm/transport_choice.hpp"
#include "config/config.hpp"
#ifdef LONGHALO_HAVE_CUDA
#include "device/device.hpp"
#endif

namespace longhalo {

enum class RunDevice { kCpu, kCuda };

/// run.device, with auto answered: cuda where this build has CUDA and every rank sees a GPU. Throws UserError
/// (on all ranks) where the GPU asked for is not there, and where some ranks have one and others have not.
/// Collective.
RunDevice run_device(const MpiSession& session, const Config& config);

/// run.precision, with auto answered: fp32 on the CPU, bf16 on CUDA. Throws UserError where `device` does not
/// compute in what is asked for; the same on every rank.
PrecisionSetting run_precision(const Config& config, RunDevice device);

TransportChoice transport_choice(const Config& config);

#ifdef LONGHALO_HAVE_CUDA
/// This rank's GPU, made current. Throws UserError (on all ranks) when it cannot be used and when two ranks
/// would share one without run.share_gpus. Collective.
std::unique_ptr<Device> open_gpu(const MpiSession& session, const Config& config);
#endif

}  // namespace longhalo

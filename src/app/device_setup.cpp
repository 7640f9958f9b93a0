#include "app/device_setup.hpp"

#include "comm/device_choice.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

#ifdef LONGHALO_HAVE_CUDA
bool has_gpu() {
  return visible_devices() > 0;
}
std::string why_no_gpu() {
  return why_no_device();
}
#else
bool has_gpu() {
  return false;
}
std::string why_no_gpu() {
  return "this build of longhalo has no CUDA";
}
#endif

}  // namespace

RunDevice run_device(const MpiSession& session, const Config& config) {
  if (config.run.device == DeviceSetting::kCpu) return RunDevice::kCpu;
  const bool asked = config.run.device == DeviceSetting::kCuda;
  const bool here = has_gpu();
  const int64_t with_gpu = sum_over_ranks(session, here ? 1 : 0);
  session.together([&] {
    if (here || (!asked && with_gpu == 0)) return;
    throw UserError(
        asked ? "run.device is cuda, but there is no GPU" : "some ranks have a GPU and this one has none",
        text("rank ", session.rank(), " on ", session.host(), ": ", why_no_gpu()),
        "run on hosts with GPUs (nvidia-smi lists them) with a build that has CUDA "
        "(LONGHALO_CUDA=ON), or set run.device: cpu");
  });
  return here ? RunDevice::kCuda : RunDevice::kCpu;
}

PrecisionSetting run_precision(const Config& config, RunDevice device) {
  const PrecisionSetting asked = config.run.precision;
  const bool fits =
      device == RunDevice::kCpu ? asked == PrecisionSetting::kFp32 : asked != PrecisionSetting::kFp32;
  if (asked == PrecisionSetting::kAuto)
    return device == RunDevice::kCpu ? PrecisionSetting::kFp32 : PrecisionSetting::kBf16;
  if (fits) return asked;
  if (device == RunDevice::kCpu)
    throw UserError("the CPU computes in fp32 alone", "run.precision bf16, fp8 or int8, and there is no GPU",
                    "run on hosts with GPUs, or remove run.precision");
  throw UserError("the GPU computes in bf16, fp8 or int8", "run.precision fp32",
                  "set run.device: cpu, or remove run.precision");
}

TransportChoice transport_choice(const Config& config) {
  switch (config.run.transport) {
    case TransportSetting::kAuto:
      return TransportChoice::kAuto;
    case TransportSetting::kNccl:
      return TransportChoice::kNccl;
    case TransportSetting::kMpi:
      return TransportChoice::kMpi;
    case TransportSetting::kStaged:
      return TransportChoice::kStaged;
  }
  throw InvariantError("every choice of run.transport is known", std::source_location::current());
}

#ifdef LONGHALO_HAVE_CUDA

std::unique_ptr<Device> open_gpu(const MpiSession& session, const Config& config) {
  const int index = choose_device(session, config.run.share_gpus ? ShareGpus::kYes : ShareGpus::kNo);
  std::unique_ptr<Device> device;
  session.together([&] { device = std::make_unique<Device>(index); });
  return device;
}

#endif

}  // namespace longhalo

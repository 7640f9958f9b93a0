#include "app/device_setup.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr int64_t kCpuTokenTile = 1024;    // larger ones gain little (docs/performance.md)
constexpr int64_t kCudaTokenTile = 16384;  // fills the GPU in every kernel of a layer

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
    throw UserError("the CPU computes in fp32 alone", "run.precision bf16 or fp8, and there is no GPU",
                    "run on hosts with GPUs, or remove run.precision");
  throw UserError("the GPU computes in bf16 or fp8", "run.precision fp32",
                  "set run.device: cpu, or remove run.precision");
}

int64_t token_tile(const Config& config, RunDevice device) {
  if (config.run.token_tile > 0) return config.run.token_tile;
  return device == RunDevice::kCpu ? kCpuTokenTile : kCudaTokenTile;
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

const char* device_word(RunDevice device) {
  return device == RunDevice::kCpu ? "CPU" : "CUDA";
}

#ifdef LONGHALO_HAVE_CUDA

std::unique_ptr<Device> open_gpu(const MpiSession& session, const Config& config) {
  std::unique_ptr<Device> device;
  session.together([&] {
    const int visible = visible_devices();
    device = std::make_unique<Device>(visible > 0 ? session.local_rank() % visible : 0);
  });
  // By UUID, because a launcher may show each rank its own GPU under the number 0.
  using Name = std::array<char, 64>;
  Name mine{};
  std::strncpy(mine.data(), device->info().uuid.c_str(), mine.size() - 1);
  std::vector<Name> all(static_cast<size_t>(session.ranks()));
  check_mpi(
      MPI_Allgather(mine.data(), sizeof(Name), MPI_CHAR, all.data(), sizeof(Name), MPI_CHAR, session.comm()),
      "MPI_Allgather");
  session.together([&] {
    const auto first = std::find(all.begin(), all.end(), mine) - all.begin();
    if (config.run.share_gpus || first == session.rank()) return;
    throw UserError(text("ranks ", first, " and ", session.rank(), " would share one GPU"),
                    text(device->info().name, " on ", session.host(), ", which has ", session.local_ranks(),
                         " ranks and shows ", visible_devices(), " GPU(s) to this one"),
                    "start at most one rank a GPU on each node (--ntasks-per-node, --gpus-per-node), or set "
                    "run.share_gpus: true");
  });
  return device;
}

#endif

}  // namespace longhalo

#include "device/device.hpp"

#include <cstdio>
#include <map>
#include <mutex>

#include "core/error.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "device/cuda_check.hpp"
#include "device/memory_pool.hpp"

namespace longhalo {
namespace {

constexpr int kLeastMajor = 8;

std::string uuid_text(const cudaUUID_t& uuid) {
  std::string out = "GPU";
  for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
    char hex[4];
    const bool dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
    std::snprintf(hex, sizeof hex, "%s%02x", dash ? "-" : "", static_cast<unsigned char>(uuid.bytes[i]));
    out += hex;
  }
  return out;
}

// Selects before the members that need a current device are made.
DeviceInfo select_device(int index) {
  const int visible = visible_devices();
  if (visible == 0)
    throw UserError("no GPU can be used", why_no_device(), "check nvidia-smi, or run with run.device: cpu");
  if (index < 0 || index >= visible)
    throw UserError(text("this rank wants GPU ", index), text(visible, " GPUs are visible to it"),
                    "start at most one rank a GPU on each node (--ntasks-per-node, --gpus-per-node), or set "
                    "run.share_gpus: true to let ranks share");
  DeviceInfo info = device_info(index);
  if (info.major < kLeastMajor)
    throw UserError(
        text("GPU ", index, " (", info.name, ") has compute capability ", info.major, ".", info.minor),
        "LongHalo's kernels need 8.0 (Ampere) or later", "use another GPU, or run.device: cpu");
  check_cuda(cudaSetDevice(index), text("selecting GPU ", index));
  return info;
}

}  // namespace

int visible_devices() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

std::string why_no_device() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess) return count > 0 ? "" : "CUDA sees no device";
  cudaGetLastError();
  return text("CUDA says: ", cudaGetErrorString(code));
}

DeviceInfo device_info(int index) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, index), text("reading the properties of GPU ", index));
  DeviceInfo info;
  info.index = index;
  info.name = properties.name;
  info.uuid = uuid_text(properties.uuid);
  info.major = properties.major;
  info.minor = properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  info.total_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  info.l2_bytes = properties.l2CacheSize;
  info.shared_bytes_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  return info;
}

const DeviceInfo& current_device_info() {
  static std::mutex mutex;
  static std::map<int, DeviceInfo> known;
  int index = 0;
  check_cuda(cudaGetDevice(&index), "cudaGetDevice");
  const std::lock_guard lock(mutex);
  const auto found = known.find(index);
  return found != known.end() ? found->second : known.emplace(index, device_info(index)).first->second;
}

Device::Device(int index) : info_(select_device(index)) {
  memory_pool();  // made now, so that its settings hold for every allocation
}

int64_t Device::available_bytes() const {
  size_t free_bytes = 0, total_bytes = 0;
  check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  const PoolUse use = memory_pool().use();
  return static_cast<int64_t>(free_bytes) + use.reserved_bytes - use.used_bytes;
}

void Device::synchronize() const {
  const Waiting waiting("all that this rank's GPU was given");
  check_cuda(cudaDeviceSynchronize(), "waiting for the GPU");
}

}  // namespace longhalo

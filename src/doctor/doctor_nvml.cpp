#include "doctor/doctor_nvml.hpp"

#include <dlfcn.h>

#include <array>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr int kSuccess = 0;
constexpr unsigned kNameBytes = 96;
constexpr unsigned kMostNvlinks = 18;
constexpr int kCorrected = 0, kUncorrected = 1;  // nvmlMemoryErrorType_t
constexpr int kSinceDriver = 0, kEver = 1;       // nvmlEccCounterType_t
constexpr int kCoreSensor = 0,
              kSlowdownThreshold = 1;          // nvmlTemperatureSensors_t, nvmlTemperatureThresholds_t
constexpr int kPeerRead = 0, kPeerNvlink = 2;  // nvmlGpuP2PCapsIndex_t
constexpr int kPeerOk = 0;                     // nvmlGpuP2PStatus_t

struct Memory {  // nvmlMemory_t
  unsigned long long total, free, used;
};

template <class Out>
std::optional<int64_t> whole(const std::optional<Out>& value) {
  return value ? std::optional<int64_t>(static_cast<int64_t>(*value)) : std::nullopt;
}
std::optional<double> watts(const std::optional<unsigned>& milliwatts) {
  return milliwatts ? std::optional<double>(*milliwatts / 1e3) : std::nullopt;
}

}  // namespace

Nvml::Nvml(const std::string& library) {
  library_ = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) {
    const char* words = ::dlerror();
    throw UserError(
        "NVIDIA's management library cannot be loaded", words == nullptr ? library : words,
        "check that nvidia-smi works on this host; doctor.nvml names another place of the library");
  }
  const auto init = find<Code()>("nvmlInit_v2");
  const Code code = init == nullptr ? -1 : init();
  if (code == kSuccess) return;
  const std::string words = init == nullptr ? "it has no nvmlInit_v2" : words_of(code);
  ::dlclose(library_);
  throw UserError(
      "NVIDIA's management library does not start", text(library, ": ", words),
      "check that nvidia-smi works on this host; the driver may have been replaced since the last boot");
}

Nvml::~Nvml() {
  if (const auto shutdown = find<Code()>("nvmlShutdown")) shutdown();
  ::dlclose(library_);
}

void* Nvml::symbol(const char* name) const {
  return ::dlsym(library_, name);
}

std::string Nvml::words_of(Code code) const {
  const auto words = find<const char*(Code)>("nvmlErrorString");
  const char* known = words == nullptr ? nullptr : words(code);
  return known == nullptr ? text("error ", code) : known;
}

std::string Nvml::driver_version() const {
  std::array<char, kNameBytes> version{};
  const auto call = find<Code(char*, unsigned)>("nvmlSystemGetDriverVersion");
  return call != nullptr && call(version.data(), kNameBytes) == kSuccess ? version.data() : "unknown";
}

Nvml::Handle Nvml::handle_of(const std::string& uuid) const {
  Handle device = nullptr;
  const auto call = find<Code(const char*, Handle*)>("nvmlDeviceGetHandleByUUID");
  const Code code = call == nullptr ? -1 : call(uuid.c_str(), &device);
  if (code == kSuccess) return device;
  // CUDA calls a part of a card (MIG) like a whole one.
  if (uuid.starts_with("GPU-") && call != nullptr &&
      call(text("MIG-", uuid.substr(4)).c_str(), &device) == kSuccess)
    return device;
  throw UserError("a GPU does not answer", text(uuid, ": ", words_of(code)),
                  "look for Xid messages (dmesg | grep -i xid), and drain this host");
}

std::vector<GpuState> Nvml::gpus(const std::vector<std::string>& uuids) const {
  std::vector<GpuState> all;
  for (const std::string& uuid : uuids)
    all.push_back(state_of(handle_of(uuid)));
  if (!uuids.empty()) return all;
  unsigned count = 0;
  const auto count_call = find<Code(unsigned*)>("nvmlDeviceGetCount_v2");
  const auto handle_call = find<Code(unsigned, Handle*)>("nvmlDeviceGetHandleByIndex_v2");
  if (count_call == nullptr || handle_call == nullptr || count_call(&count) != kSuccess) return all;
  for (unsigned index = 0; index < count; ++index) {
    Handle device = nullptr;
    if (const Code code = handle_call(index, &device); code != kSuccess)
      throw UserError("a GPU does not answer", text("GPU ", index, ": ", words_of(code)),
                      "look for Xid messages (dmesg | grep -i xid), and drain this host");
    all.push_back(state_of(device));
  }
  return all;
}

template <class Out>
std::optional<Out> Nvml::number(const char* name, Handle device) const {
  const auto call = find<Code(Handle, Out*)>(name);
  Out value{};
  if (call == nullptr || call(device, &value) != kSuccess) return std::nullopt;
  return value;
}

std::string Nvml::name_from(const char* name, Handle device) const {
  std::array<char, kNameBytes> words{};
  const auto call = find<Code(Handle, char*, unsigned)>(name);
  return call != nullptr && call(device, words.data(), kNameBytes) == kSuccess ? words.data() : "unknown";
}

std::optional<int64_t> Nvml::errors(Handle device, int type, int counter) const {
  unsigned long long count = 0;
  const auto call = find<Code(Handle, int, int, unsigned long long*)>("nvmlDeviceGetTotalEccErrors");
  if (call == nullptr || call(device, type, counter, &count) != kSuccess) return std::nullopt;
  return static_cast<int64_t>(count);
}

GpuState Nvml::state_of(Handle device) const {
  GpuState gpu;
  gpu.index = static_cast<int>(number<unsigned>("nvmlDeviceGetIndex", device).value_or(0));
  gpu.name = name_from("nvmlDeviceGetName", device);
  gpu.uuid = name_from("nvmlDeviceGetUUID", device);
  if (const auto memory = number<Memory>("nvmlDeviceGetMemoryInfo", device)) {
    gpu.total_bytes = static_cast<int64_t>(memory->total);
    gpu.free_bytes = static_cast<int64_t>(memory->free);
  }

  unsigned now = 0, later = 0;
  if (const auto call = find<Code(Handle, unsigned*, unsigned*)>("nvmlDeviceGetEccMode");
      call != nullptr && call(device, &now, &later) == kSuccess)
    gpu.ecc = now != 0;
  gpu.uncorrected_errors = errors(device, kUncorrected, kSinceDriver);
  gpu.uncorrected_errors_ever = errors(device, kUncorrected, kEver);
  gpu.corrected_errors = errors(device, kCorrected, kSinceDriver);
  unsigned corrected = 0, uncorrected = 0, pending = 0, failed = 0;
  if (const auto call =
          find<Code(Handle, unsigned*, unsigned*, unsigned*, unsigned*)>("nvmlDeviceGetRemappedRows");
      call != nullptr && call(device, &corrected, &uncorrected, &pending, &failed) == kSuccess) {
    gpu.remap_pending = pending != 0;
    gpu.remap_failed = failed != 0;
  }

  // Renamed in newer drivers, which keep the old name; the bits are the same.
  auto reasons = number<unsigned long long>("nvmlDeviceGetCurrentClocksEventReasons", device);
  if (!reasons) reasons = number<unsigned long long>("nvmlDeviceGetCurrentClocksThrottleReasons", device);
  if (reasons) gpu.slow_reasons = *reasons;
  unsigned celsius = 0;
  if (const auto call = find<Code(Handle, int, unsigned*)>("nvmlDeviceGetTemperature");
      call != nullptr && call(device, kCoreSensor, &celsius) == kSuccess)
    gpu.celsius = celsius;
  if (const auto call = find<Code(Handle, int, unsigned*)>("nvmlDeviceGetTemperatureThreshold");
      call != nullptr && call(device, kSlowdownThreshold, &celsius) == kSuccess)
    gpu.slowdown_celsius = celsius;
  gpu.power_limit_watts = watts(number<unsigned>("nvmlDeviceGetPowerManagementLimit", device));
  gpu.default_power_limit_watts = watts(number<unsigned>("nvmlDeviceGetPowerManagementDefaultLimit", device));
  if (const auto mode = number<unsigned>("nvmlDeviceGetPersistenceMode", device))
    gpu.persistence = *mode != 0;

  gpu.pcie_generation = whole(number<unsigned>("nvmlDeviceGetCurrPcieLinkGeneration", device));
  gpu.most_pcie_generation = whole(number<unsigned>("nvmlDeviceGetMaxPcieLinkGeneration", device));
  gpu.pcie_width = whole(number<unsigned>("nvmlDeviceGetCurrPcieLinkWidth", device));
  gpu.most_pcie_width = whole(number<unsigned>("nvmlDeviceGetMaxPcieLinkWidth", device));
  if (const auto call = find<Code(Handle, unsigned, unsigned*)>("nvmlDeviceGetNvLinkState")) {
    for (unsigned link = 0; link < kMostNvlinks; ++link) {
      unsigned active = 0;
      if (call(device, link, &active) != kSuccess) continue;  // there is no such link
      ++gpu.nvlinks;
      gpu.active_nvlinks += active != 0 ? 1 : 0;
    }
  }
  return gpu;
}

std::vector<GpuPair> Nvml::pairs(const std::vector<GpuState>& gpus) const {
  const auto ancestor = find<Code(Handle, Handle, int*)>("nvmlDeviceGetTopologyCommonAncestor");
  const auto peer = find<Code(Handle, Handle, int, int*)>("nvmlDeviceGetP2PStatus");
  std::vector<GpuPair> pairs;
  for (size_t i = 0; i < gpus.size(); ++i) {
    for (size_t j = i + 1; j < gpus.size(); ++j) {
      if (gpus[i].uuid == gpus[j].uuid) continue;  // shared by two ranks
      Handle first = handle_of(gpus[i].uuid), second = handle_of(gpus[j].uuid);
      GpuPair pair{gpus[i].index, gpus[j].index, {}, {}, {}};
      int value = 0;
      if (ancestor != nullptr && ancestor(first, second, &value) == kSuccess) pair.ancestor = value;
      if (peer != nullptr && peer(first, second, kPeerNvlink, &value) == kSuccess)
        pair.nvlink = value == kPeerOk;
      if (peer != nullptr && peer(first, second, kPeerRead, &value) == kSuccess)
        pair.peer_memory = value == kPeerOk;
      pairs.push_back(pair);
    }
  }
  return pairs;
}

}  // namespace longhalo

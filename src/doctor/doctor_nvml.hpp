// NVIDIA's management library (NVML), loaded when it is asked for: a build without CUDA and a host without a
// driver know nothing of it, and the driver's copy is the one that fits the driver. Only the few calls used
// here are declared, in the form that has been stable since their _v2. What a GPU does not support is empty.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace longhalo {

struct GpuState {
  int index = 0;  // as nvidia-smi numbers them
  std::string name, uuid;
  std::optional<int64_t> total_bytes, free_bytes;
  std::optional<bool> ecc, persistence;
  std::optional<int64_t> uncorrected_errors;  // since the driver was loaded
  std::optional<int64_t> uncorrected_errors_ever;
  std::optional<int64_t> corrected_errors;          // since the driver was loaded
  std::optional<bool> remap_pending, remap_failed;  // rows of memory that are to be replaced by spare ones
  std::optional<uint64_t> slow_reasons;  // why the clocks are lower than they could be: bits, see below
  std::optional<int64_t> celsius, slowdown_celsius;
  std::optional<double> power_limit_watts, default_power_limit_watts;
  std::optional<int64_t> pcie_generation, most_pcie_generation, pcie_width, most_pcie_width;
  int active_nvlinks = 0, nvlinks = 0;
};

/// Bits of GpuState::slow_reasons, as NVML numbers them. (Idle clocks, bit 1, are no fault.)
inline constexpr uint64_t kSlowBySetting = 0x2, kSlowByPowerCap = 0x4, kSlowByHardware = 0x8,
                          kSlowBySoftwareHeat = 0x20, kSlowByHardwareHeat = 0x40, kSlowByPowerBrake = 0x80;

/// How two GPUs of a host reach each other.
struct GpuPair {
  int first = 0, second = 0;  // GpuState::index
  std::optional<int64_t>
      ancestor;  // where their PCIe paths meet: 10, 20 switches, 30 host bridge, 40 socket, 50 none
  std::optional<bool> nvlink, peer_memory;
};

class Nvml {
 public:
  /// Loads `library` (a name for the loader, or a path) and starts it. Throws UserError with the loader's or
  /// NVML's words.
  explicit Nvml(const std::string& library);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  std::string driver_version() const;
  /// The GPUs of these unique names; with none given all GPUs that NVML shows. Throws UserError for one that
  /// cannot be asked: it may have fallen off the bus.
  std::vector<GpuState> gpus(const std::vector<std::string>& uuids) const;
  std::vector<GpuPair> pairs(const std::vector<GpuState>& gpus) const;

 private:
  using Handle = void*;
  using Code = int;
  /// A function of the library; empty where it is too old or too new to have it.
  template <class Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(symbol(name));
  }
  void* symbol(const char* name) const;
  std::string words_of(Code code) const;
  Handle handle_of(const std::string& uuid) const;
  GpuState state_of(Handle device) const;
  template <class Out>
  std::optional<Out> number(const char* call, Handle device) const;
  std::string name_from(const char* call, Handle device) const;
  std::optional<int64_t> errors(Handle device, int type, int counter) const;

  void* library_ = nullptr;
};

}  // namespace longhalo

// The GPU of this process: chosen once, with its memory pool and its three streams.
//
// compute runs kernels, communication carries halos and landmarks beside them, copy moves bytes between host
// and device. They are ordered among each other by events alone.
#pragma once

#include <cstdint>
#include <string>

#include "device/stream.hpp"

namespace longhalo {

struct DeviceInfo {
  int index = 0;  // as CUDA numbers the visible devices
  std::string name;
  std::string uuid;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int64_t total_bytes = 0;
  int64_t l2_bytes = 0;
  int64_t shared_bytes_per_block = 0;  // after opting in
  bool is_hopper() const { return major == 9 && minor == 0; }
};

/// GPUs that this process may use; 0 where there is none or no driver. Never throws.
int visible_devices() noexcept;

/// Why there is none, in one sentence; empty when visible_devices() > 0.
std::string why_no_device();

class Device {
 public:
  /// Makes device `index` (modulo nothing: it must exist) the current one of this thread. Throws UserError
  /// when it is missing or its compute capability is below 8.0.
  explicit Device(int index);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const DeviceInfo& info() const { return info_; }
  Stream& compute() { return compute_; }
  Stream& communication() { return communication_; }
  Stream& copy() { return copy_; }
  /// Bytes that can still be allocated: free on the card, and free inside our pool.
  int64_t available_bytes() const;
  /// Makes the host wait for all streams of the device.
  void synchronize() const;

 private:
  DeviceInfo info_;
  Stream compute_;
  Stream communication_{StreamPriority::kHigh};
  Stream copy_;
};

/// Properties of device `index`.
DeviceInfo device_info(int index);
/// Of the device that is current in this thread; read once.
const DeviceInfo& current_device_info();

}  // namespace longhalo

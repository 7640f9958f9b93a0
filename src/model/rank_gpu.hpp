// One rank's GPU, with what computes and exchanges there: what both engines of GPUs stand on.
#pragma once

#include <memory>
#include <string>

#include "comm/transport.hpp"
#include "device/device.hpp"
#include "kernels/matmul/device_matmul.hpp"
#include "model/device_prefill.hpp"
#include "model/engine.hpp"

namespace longhalo {

class RankGpu {
 public:
  /// Throws UserError, on all ranks, when the transport wanted cannot be used. Collective. `session` must
  /// outlive it.
  RankGpu(const MpiSession& session, std::unique_ptr<Device> device, TransportChoice transport);

  Device& device() { return *device_; }
  const Device& device() const { return *device_; }
  cudaStream_t compute() const { return device_->compute(); }
  DeviceMatmul& matmul() { return *matmul_; }
  /// Products that are made in the same way by every process, and so give the same bits; some are slower.
  void choose_products_alike();
  DeviceRoom room() { return {*device_, *transport_.transport, *matmul_}; }

  std::string name() const;  // "NVIDIA H200 0 (shared)"
  const std::string& transport_reason() const { return transport_.reason; }
  int64_t available_bytes() const { return device_->available_bytes() / sharing_; }
  std::string memory_place() const;
  DeviceMemoryUse memory_use() const;

 private:
  const MpiSession& session_;
  std::unique_ptr<Device> device_;
  int sharing_;  // ranks on this card
  ChosenTransport transport_;
  std::unique_ptr<DeviceMatmul> matmul_;
};

}  // namespace longhalo

// The way back of keys and values in device memory (gradient_return.hpp is its CPU form): gradients of halo
// rows and of landmarks go to the ranks that own them, which add them up in rank order. On the communication
// stream between start() and add(); the host does not wait.
#pragma once

#include <vector>

#include "comm/device_exchange.hpp"
#include "comm/gradient_return.hpp"
#include "device/device_buffer.hpp"

namespace longhalo {

class DeviceGradientReturn {
 public:
  /// A row is [2, H_kv, d] in fp32, row_elements = 2 * H_kv * d.
  DeviceGradientReturn(Transport& transport, ReturnPlan plan, int64_t row_elements, cudaStream_t compute);

  /// Row 0 of `rows` is token (or segment) `first`. What is sent must not change before add().
  void start(float* rows, int64_t first, cudaStream_t compute, cudaStream_t communication);
  /// Makes `compute` wait, and adds what came to this rank's own rows.
  void add(float* rows, int64_t first, cudaStream_t compute);
  /// So far; the device must be past add().
  CommCost cost();

 private:
  Transport& transport_;
  ReturnPlan plan_;
  int64_t row_elements_;
  DeviceBuffer<float> arrived_;
  Handover handover_{Timing::kOn};
  CommCost cost_;
};

}  // namespace longhalo

// What this GPU reaches in large matrix products, in the run that is planned or measured by it.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/matmul/device_matmul.hpp"
#include "model/engine.hpp"

namespace longhalo {

/// bf16 for attention, and for the layers' products too unless `precision` is kFp8 or kInt8. About `seconds`;
/// the host waits. `matmul` queues on `stream`.
MatmulRates measure_device_rates(DeviceMatmul& matmul, Precision precision, cudaStream_t stream,
                                 double seconds);

}  // namespace longhalo

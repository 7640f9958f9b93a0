// What this GPU reaches at best, measured in the run that it is compared with: no data sheet says what a card
// under load does.
#pragma once

#include "bench/bench_report.hpp"
#include "comm/mpi_session.hpp"
#include "device/device.hpp"

namespace longhalo {

struct GpuRates {
  double matmul_flops = 0;           // FLOP/s of an 8192-cubed bf16 product through DeviceMatmul
  double copy_bytes_per_second = 0;  // read plus written, by a device-to-device copy of 2 GiB
};

/// About half a second, on the compute stream; allocates up to 4.4 GB for that time, less where the card has
/// less left. The host waits.
GpuRates measure_gpu_rates(Device& device);

GpuRates mean_of(const GpuRates& a, const GpuRates& b);

/// The rows matmul_tflops and copy_gb_per_second, mean over ranks. Collective.
void report_rates(BenchReport& report, const MpiSession& session, const GpuRates& rates);

}  // namespace longhalo

#include "bench/gpu_rates.hpp"

#include <algorithm>

#include "bench/device_timer.hpp"
#include "device/device_buffer.hpp"
#include "kernels/matmul/device_matmul.hpp"
#include "kernels/random/fill_normal.hpp"

namespace longhalo {
namespace {

constexpr int64_t kSide = 8192;
constexpr int64_t kCopyBytes = int64_t{2} << 30;
constexpr int64_t kRepeats = 7;

double matmul_rate(Device& device) {
  cudaStream_t stream = device.compute();
  constexpr int64_t kValues = kSide * kSide;  // 128 MiB an operand: more than any L2 cache
  DeviceBuffer<BFloat16> a(kValues, "the matrix product to compare with", stream);
  DeviceBuffer<BFloat16> w(kValues, "the matrix product to compare with", stream);
  DeviceBuffer<BFloat16> c(kValues, "the matrix product to compare with", stream);
  fill_normal(stream, kValues, 1, 0, 1, a.data());
  fill_normal(stream, kValues, 1, 1, 1, w.data());
  DeviceMatmul matmul(stream);
  const TimedRuns timed = time_on_device(
      stream, kRepeats, [&](int64_t) { matmul.run(kSide, kSide, kSide, a.data(), w.data(), c.data()); });
  return 2.0 * static_cast<double>(kSide) * static_cast<double>(kValues) / timed.median_seconds;
}

double copy_rate(Device& device) {
  cudaStream_t stream = device.compute();
  const int64_t values =
      std::min(kCopyBytes, device.available_bytes() / 4) / static_cast<int64_t>(sizeof(BFloat16));
  DeviceBuffer<BFloat16> from(values, "the copy to compare with", stream);
  DeviceBuffer<BFloat16> to(values, "the copy to compare with", stream);
  fill_normal(stream, values, 2, 0, 1, from.data());
  const TimedRuns timed =
      time_on_device(stream, kRepeats, [&](int64_t) { copy_async(to.data(), from.data(), values, stream); });
  return 2.0 * static_cast<double>(from.bytes()) / timed.median_seconds;
}

}  // namespace

GpuRates measure_gpu_rates(Device& device) {
  GpuRates rates;
  rates.copy_bytes_per_second = copy_rate(device);
  rates.matmul_flops = matmul_rate(device);
  device.synchronize();
  return rates;
}

GpuRates mean_of(const GpuRates& a, const GpuRates& b) {
  return {(a.matmul_flops + b.matmul_flops) / 2, (a.copy_bytes_per_second + b.copy_bytes_per_second) / 2};
}

void report_rates(BenchReport& report, const MpiSession& session, const GpuRates& rates) {
  report.add("matmul_tflops", spread_over_ranks(session, rates.matmul_flops).mean / 1e12, "TFLOP/s",
             "bf16 product of 8192 cubed, in this run; a GPU");
  report.add("copy_gb_per_second", spread_over_ranks(session, rates.copy_bytes_per_second).mean / 1e9, "GB/s",
             "device copy of 2 GiB, read and written, in this run; a GPU");
}

}  // namespace longhalo

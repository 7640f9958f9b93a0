#include "model/device_rates.hpp"

#include <algorithm>
#include <functional>
#include <vector>

#include "core/clock.hpp"
#include "device/device_buffer.hpp"
#include "device/stream.hpp"
#include "kernels/quantize/quantize.hpp"
#include "kernels/random/fill_normal.hpp"

namespace longhalo {
namespace {

constexpr int64_t kSide = 8192;
constexpr int64_t kElements = kSide * kSide;
constexpr int kRunsPerSample = 4;
constexpr const char* kPurpose = "measuring the matrix product rate";

// Median of samples of a few runs each, after a warm-up. Normal numbers: a card draws less power, and is
// faster, on zeros.
double rate_of(cudaStream_t stream, double seconds, const std::function<void()>& product) {
  product();
  std::vector<double> samples;
  const Stopwatch watch;
  do {
    Event begin(Timing::kOn), end(Timing::kOn);
    begin.record(stream);
    for (int run = 0; run < kRunsPerSample; ++run)
      product();
    end.record(stream);
    end.synchronize();
    samples.push_back(seconds_between(begin, end) / kRunsPerSample);
  } while (watch.seconds() < seconds || samples.size() < 3);
  std::nth_element(samples.begin(), samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2),
                   samples.end());
  return 2.0 * kSide * kSide * kSide / samples[samples.size() / 2];
}

// In eight bits, of operands quantised from a and w.
template <class Rows, class Value>
double rate_of_rows(DeviceMatmul& matmul, cudaStream_t stream, double seconds, const BFloat16* a,
                    const BFloat16* w, BFloat16* c) {
  DeviceBuffer<Value> a8(kElements, kPurpose, stream), w8(kElements, kPurpose, stream);
  DeviceBuffer<float> a_scales(kSide, kPurpose, stream), w_scales(kSide, kPurpose, stream);
  const Rows a_rows{a8.data(), a_scales.data()}, w_rows{w8.data(), w_scales.data()};
  quantize_rows(stream, kSide, kSide, a, a_rows);
  quantize_rows(stream, kSide, kSide, w, w_rows);
  return rate_of(stream, seconds, [&] { matmul.run(kSide, kSide, kSide, a_rows, w_rows, c); });
}

}  // namespace

MatmulRates measure_device_rates(DeviceMatmul& matmul, Precision precision, cudaStream_t stream,
                                 double seconds) {
  DeviceBuffer<BFloat16> a(kElements, kPurpose, stream), w(kElements, kPurpose, stream),
      c(kElements, kPurpose, stream);
  fill_normal(stream, kElements, 1, 0, 1.0F, a.data());
  fill_normal(stream, kElements, 1, 1, 1.0F, w.data());
  MatmulRates rates;
  const double share = has_eight_bits(precision) ? seconds / 2 : seconds;
  rates.attention =
      rate_of(stream, share, [&] { matmul.run(kSide, kSide, kSide, a.data(), w.data(), c.data()); });
  rates.products = rates.attention;
  if (precision == Precision::kFp8)
    rates.products = rate_of_rows<Fp8Rows, Fp8E4M3>(matmul, stream, share, a.data(), w.data(), c.data());
  if (precision == Precision::kInt8)
    rates.products = rate_of_rows<Int8Rows, int8_t>(matmul, stream, share, a.data(), w.data(), c.data());
  return rates;
}

}  // namespace longhalo

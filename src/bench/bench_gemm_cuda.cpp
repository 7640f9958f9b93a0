// `longhalo bench gemm` on a GPU: bf16 and fp8 products through DeviceMatmul, as the layers call it.
#include <algorithm>
#include <cmath>

#include "app/device_setup.hpp"
#include "bench/bench.hpp"
#include "bench/bench_gemm.hpp"
#include "bench/device_timer.hpp"
#include "bench/gpu_rates.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "device/device_buffer.hpp"
#include "kernels/matmul/device_matmul.hpp"
#include "kernels/quantize/quantize.hpp"
#include "kernels/random/fill_normal.hpp"

namespace longhalo {
namespace {

enum class Operands { kBf16, kFp8 };

// Largest relative error of a sample. The result is rounded to bf16: 2^-9. Fast fp8 accumulation keeps about
// 14 bits of the sum after every 32 terms.
double most_error(Operands operands, const Product& product) {
  constexpr double kBf16 = 5e-3;
  return operands == Operands::kBf16 ? kBf16 : kBf16 + static_cast<double>(product.inputs) / 32 * 0x1p-14;
}

// e4m3: 4 bits of exponent with bias 7, 3 of fraction; only all ones is NaN.
double value_of(Fp8E4M3 x) {
  const int exponent = x.bits >> 3 & 15, fraction = x.bits & 7;
  if (exponent == 15 && fraction == 7) return std::nan("");
  const double size = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return (x.bits & 0x80) != 0 ? -size : size;
}

// Rows of e4m3 with their scales.
struct Fp8Matrix {
  DeviceBuffer<Fp8E4M3> values;
  DeviceBuffer<float> scales;

  Fp8Matrix(int64_t rows, int64_t width, const BFloat16* from, cudaStream_t stream)
      : values(rows * width, "fp8 operand", stream), scales(rows, "fp8 scales", stream) {
    quantize_rows(stream, rows, width, from, all());
  }
  Fp8Rows all() { return {values.data(), scales.data()}; }
};

class ProductBench {
 public:
  ProductBench(Device& device, DeviceMatmul& matmul, const Product& product)
      : stream_(device.compute()), matmul_(matmul), product_(product) {
    const int64_t values = product.rows * product.inputs + product.outputs * product.inputs;
    const int64_t copies = rotating_copies(values * static_cast<int64_t>(sizeof(BFloat16)));
    for (int64_t copy = 0; copy < copies; ++copy) {
      a_.push_back(random(product.rows * product.inputs, 1));
      w_.push_back(
          random(product.outputs * product.inputs, 1 / std::sqrt(static_cast<float>(product.inputs))));
    }
    c_ = random(product.rows * product.outputs, 1);
  }

  TimedRuns time(Operands operands, int64_t repeats) {
    if (operands == Operands::kFp8) quantize();
    return time_on_device(stream_, repeats,
                          [&](int64_t run) { multiply(operands, static_cast<size_t>(run) % a_.size()); });
  }

  /// Of one more product, into fresh random numbers where it adds, into NaN where it overwrites.
  double error(Operands operands) {
    if (product_.accumulate == Accumulate::kAdd)
      c_ = random(c_.size(), 1);
    else
      check_cuda(cudaMemsetAsync(c_.data(), 0xff, static_cast<size_t>(c_.bytes()), stream_), "poisoning");
    DeviceBuffer<BFloat16> before(c_.size(), "result before the product", stream_);
    copy_async(before.data(), c_.data(), c_.size(), stream_);
    multiply(operands, 0);
    return sampled_product_error(product_, [&](int64_t row, int64_t output) {
      const std::vector<double> a = operand(operands, a_[0], a8_, row),
                                w = operand(operands, w_[0], w8_, output);
      double exact = 0;
      for (size_t i = 0; i < a.size(); ++i)
        exact += a[i] * w[i];
      const int64_t at = row * product_.outputs + output;
      if (product_.accumulate == Accumulate::kAdd) exact += to_float(fetch(before.data() + at, 1)[0]);
      return std::pair<double, double>(to_float(fetch(c_.data() + at, 1)[0]), exact);
    });
  }

 private:
  DeviceBuffer<BFloat16> random(int64_t count, float deviation) {
    DeviceBuffer<BFloat16> values(count, "benchmark input", stream_);
    fill_normal(stream_, count, 11, next_array_++, deviation, values.data());
    return values;
  }

  void quantize() {
    for (size_t copy = a8_.size(); copy < a_.size(); ++copy) {
      a8_.emplace_back(product_.rows, product_.inputs, a_[copy].data(), stream_);
      w8_.emplace_back(product_.outputs, product_.inputs, w_[copy].data(), stream_);
    }
  }

  void multiply(Operands operands, size_t copy) {
    if (operands == Operands::kBf16)
      matmul_.run(product_.rows, product_.outputs, product_.inputs, a_[copy].data(), w_[copy].data(),
                  c_.data(), product_.accumulate);
    else
      matmul_.run(product_.rows, product_.outputs, product_.inputs, ConstFp8Rows(a8_[copy].all()),
                  ConstFp8Rows(w8_[copy].all()), c_.data(), product_.accumulate);
  }

  template <class T>
  std::vector<T> fetch(const T* from, int64_t count) const {
    std::vector<T> values(static_cast<size_t>(count));
    to_host<T>(values, from, stream_);
    return values;
  }

  // One row of an operand as the product takes it.
  std::vector<double> operand(Operands operands, const DeviceBuffer<BFloat16>& bf16,
                              std::vector<Fp8Matrix>& fp8, int64_t row) const {
    std::vector<double> wide;
    const int64_t width = product_.inputs;
    if (operands == Operands::kBf16) {
      for (const BFloat16 value : fetch(bf16.data() + row * width, width))
        wide.push_back(to_float(value));
      return wide;
    }
    const double scale = fetch<float>(fp8[0].scales.data() + row, 1)[0];
    for (const Fp8E4M3 value : fetch<Fp8E4M3>(fp8[0].values.data() + row * width, width))
      wide.push_back(scale * value_of(value));
    return wide;
  }

  cudaStream_t stream_;
  DeviceMatmul& matmul_;
  Product product_;
  uint64_t next_array_ = 0;
  std::vector<DeviceBuffer<BFloat16>> a_, w_;  // copies that rotate
  std::vector<Fp8Matrix> a8_, w8_;
  DeviceBuffer<BFloat16> c_;
};

std::vector<Operands> chosen_operands(const Config& config, const DeviceInfo& gpu) {
  switch (config.run.precision) {
    case PrecisionSetting::kFp8:
      return {Operands::kFp8};
    case PrecisionSetting::kBf16:
      return {Operands::kBf16};
    default:
      break;
  }
  if (gpu.major < 9) return {Operands::kBf16};
  return {Operands::kBf16, Operands::kFp8};
}

}  // namespace

void run_bench_gemm_cuda(const MpiSession& session, const Config& config) {
  const std::unique_ptr<Device> device = open_gpu(session, config);
  std::vector<Product> products = named_product(config.bench);
  if (products.empty()) products = layer_products(config.bench);
  const GpuRates before = measure_gpu_rates(*device);
  struct Result {
    Product product;
    Operands operands;
    TimedRuns time;
    double error;
  };
  std::vector<Result> results;
  DeviceMatmul matmul(device->compute());
  for (const Product& product : products) {
    std::unique_ptr<ProductBench> one;
    session.together([&] {
      if (product.inputs % 16 != 0 || product.outputs % 16 != 0)
        throw UserError("the GPU's matrix products take multiples of 16",
                        text("bench.outputs ", product.outputs, ", bench.inputs ", product.inputs),
                        "choose multiples of 16, or run.device: cpu");
      one = std::make_unique<ProductBench>(*device, matmul, product);
    });
    for (const Operands operands : chosen_operands(config, device->info())) {
      wait_for_all(session);
      TimedRuns time;
      session.together([&] { time = one->time(operands, config.bench.repeats); });  // fp8 may not be possible
      results.push_back({product, operands, time, one->error(operands)});
    }
  }
  const GpuRates rates = mean_of(before, measure_gpu_rates(*device));

  BenchReport report("matrix products, CUDA");
  report.add("device", device->info().name);
  report.add("ranks", session.ranks(), "", "each runs all products at the same time");
  report.add("repeats", config.bench.repeats, "", "median of these");
  BenchTable table = product_table();
  const double rate = spread_over_ranks(session, rates.matmul_flops).mean;
  for (Result& one : results) {
    const double median = spread_over_ranks(session, one.time.median_seconds).mean;
    one.error = spread_over_ranks(session, one.error).max;
    table.add({one.product.name, one.operands == Operands::kBf16 ? "bf16" : "fp8", one.product.rows,
               one.product.outputs, one.product.inputs, median,
               spread_over_ranks(session, one.time.min_seconds).min, one.product.flops() / median / 1e12,
               100 * one.product.flops() / median / rate, one.error});
  }
  report.add_table("products", table, "share of the bf16 rate below; error of sampled entries against fp64");
  report_rates(report, session, rates);
  report.publish(session, config.bench.json);
  session.together([&] {
    for (const Result& one : results)
      check(one.error <= most_error(one.operands, one.product),
            text("the product that was timed is right: ", one.product.name, ", relative error ", one.error));
  });
}

}  // namespace longhalo

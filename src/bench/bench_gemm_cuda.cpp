// `longhalo bench gemm` on a GPU: bf16, fp8 and int8 products through DeviceMatmul, as the layers call it.
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
#include "kernels/matmul/int8_matmul.hpp"
#include "kernels/quantize/quantize.hpp"
#include "kernels/random/fill_normal.hpp"
#include "model/precision.hpp"

namespace longhalo {
namespace {

// Largest relative error of a sample. The result is rounded to bf16: 2^-9. Fast fp8 accumulation keeps about
// 14 bits of the sum after every 32 terms; sums of int8 are exact.
double most_error(Precision precision, const Product& product) {
  constexpr double kBf16 = 5e-3;
  return precision == Precision::kFp8 ? kBf16 + static_cast<double>(product.inputs) / 32 * 0x1p-14 : kBf16;
}

// e4m3: 4 bits of exponent with bias 7, 3 of fraction; only all ones is NaN.
double value_of(Fp8E4M3 x) {
  const int exponent = x.bits >> 3 & 15, fraction = x.bits & 7;
  if (exponent == 15 && fraction == 7) return std::nan("");
  const double size = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return (x.bits & 0x80) != 0 ? -size : size;
}
double value_of(int8_t x) {
  return x;
}

template <class T>
std::vector<T> fetch(const T* from, int64_t count, cudaStream_t stream) {
  std::vector<T> values(static_cast<size_t>(count));
  to_host<T>(values, from, stream);
  return values;
}

// Rows in eight bits with their scales: Value Fp8E4M3 with Fp8Rows, or int8_t with Int8Rows.
template <class Value, class Rows>
struct QuantisedMatrix {
  DeviceBuffer<Value> values;
  DeviceBuffer<float> scales;

  QuantisedMatrix(int64_t rows, int64_t width, const BFloat16* from, cudaStream_t stream)
      : values(rows * width, "operand in eight bits", stream), scales(rows, "scales", stream) {
    quantize_rows(stream, rows, width, from, all());
  }
  Rows all() { return {values.data(), scales.data()}; }

  // One row as the product takes it.
  std::vector<double> row(int64_t row, int64_t width, cudaStream_t stream) const {
    std::vector<double> wide;
    const double scale = fetch(scales.data() + row, 1, stream)[0];
    for (const Value value : fetch(values.data() + row * width, width, stream))
      wide.push_back(scale * value_of(value));
    return wide;
  }
};
using Fp8Matrix = QuantisedMatrix<Fp8E4M3, Fp8Rows>;
using Int8Matrix = QuantisedMatrix<int8_t, Int8Rows>;

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

  TimedRuns time(Precision precision, int64_t repeats) {
    if (precision == Precision::kFp8) quantize(a_fp8_, w_fp8_);
    if (precision == Precision::kInt8) quantize(a_int8_, w_int8_);
    return time_on_device(stream_, repeats,
                          [&](int64_t run) { multiply(precision, static_cast<size_t>(run) % a_.size()); });
  }

  /// Of one more product, into fresh random numbers where it adds, into NaN where it overwrites.
  double error(Precision precision) {
    if (product_.accumulate == Accumulate::kAdd)
      c_ = random(c_.size(), 1);
    else
      check_cuda(cudaMemsetAsync(c_.data(), 0xff, static_cast<size_t>(c_.bytes()), stream_), "poisoning");
    DeviceBuffer<BFloat16> before(c_.size(), "result before the product", stream_);
    copy_async(before.data(), c_.data(), c_.size(), stream_);
    multiply(precision, 0);
    return sampled_product_error(product_, [&](int64_t row, int64_t output) {
      const auto [a, w] = operands(precision, row, output);
      double exact = 0;
      for (size_t i = 0; i < a.size(); ++i)
        exact += a[i] * w[i];
      const int64_t at = row * product_.outputs + output;
      if (product_.accumulate == Accumulate::kAdd)
        exact += to_float(fetch(before.data() + at, 1, stream_)[0]);
      return std::pair<double, double>(to_float(fetch(c_.data() + at, 1, stream_)[0]), exact);
    });
  }

 private:
  DeviceBuffer<BFloat16> random(int64_t count, float deviation) {
    DeviceBuffer<BFloat16> values(count, "benchmark input", stream_);
    fill_normal(stream_, count, 11, next_array_++, deviation, values.data());
    return values;
  }

  template <class Matrix>
  void quantize(std::vector<Matrix>& a, std::vector<Matrix>& w) {
    for (size_t copy = a.size(); copy < a_.size(); ++copy) {
      a.emplace_back(product_.rows, product_.inputs, a_[copy].data(), stream_);
      w.emplace_back(product_.outputs, product_.inputs, w_[copy].data(), stream_);
    }
  }

  void multiply(Precision precision, size_t copy) {
    const auto run = [&](const auto& a, const auto& w) {
      matmul_.run(product_.rows, product_.outputs, product_.inputs, a, w, c_.data(), product_.accumulate);
    };
    if (precision == Precision::kFp8)
      run(a_fp8_[copy].all(), w_fp8_[copy].all());
    else if (precision == Precision::kInt8)
      run(a_int8_[copy].all(), w_int8_[copy].all());
    else
      run(a_[copy].data(), w_[copy].data());
  }

  // A row of each operand as the product takes it.
  std::pair<std::vector<double>, std::vector<double>> operands(Precision precision, int64_t row,
                                                               int64_t output) const {
    const int64_t width = product_.inputs;
    const auto both = [&](const auto& a, const auto& w) {
      return std::pair(a[0].row(row, width, stream_), w[0].row(output, width, stream_));
    };
    if (precision == Precision::kFp8) return both(a_fp8_, w_fp8_);
    if (precision == Precision::kInt8) return both(a_int8_, w_int8_);
    const auto wide = [&](const DeviceBuffer<BFloat16>& matrix, int64_t index) {
      std::vector<double> values;
      for (const BFloat16 value : fetch(matrix.data() + index * width, width, stream_))
        values.push_back(to_float(value));
      return values;
    };
    return {wide(a_[0], row), wide(w_[0], output)};
  }

  cudaStream_t stream_;
  DeviceMatmul& matmul_;
  Product product_;
  uint64_t next_array_ = 0;
  std::vector<DeviceBuffer<BFloat16>> a_, w_;  // copies that rotate
  std::vector<Fp8Matrix> a_fp8_, w_fp8_;
  std::vector<Int8Matrix> a_int8_, w_int8_;
  DeviceBuffer<BFloat16> c_;
};

bool int8_takes(const Product& product) {
  return product.inputs % kHadamardBlock == 0 && product.inputs <= kLongestInt8Sum;
}

// The one that is asked for, or else all that the GPU has and the product can be made in.
std::vector<Precision> chosen_precisions(const Config& config, const DeviceInfo& gpu,
                                         const Product& product) {
  switch (config.run.precision) {
    case PrecisionSetting::kFp8:
      return {Precision::kFp8};
    case PrecisionSetting::kInt8:
      return {Precision::kInt8};
    case PrecisionSetting::kBf16:
      return {Precision::kBf16};
    default:
      break;
  }
  std::vector<Precision> all = {Precision::kBf16};
  if (gpu.major >= 9) all.push_back(Precision::kFp8);
  if (gpu.is_hopper() && int8_takes(product)) all.push_back(Precision::kInt8);
  return all;
}

void check_dimensions(const Product& product, const Config& config) {
  const std::string place = text("bench.outputs ", product.outputs, ", bench.inputs ", product.inputs);
  if (product.inputs % 16 != 0 || product.outputs % 16 != 0)
    throw UserError("the GPU's matrix products take multiples of 16", place,
                    "choose multiples of 16, or run.device: cpu");
  if (config.run.precision == PrecisionSetting::kInt8 && !int8_takes(product))
    throw UserError(text("products in int8 take inputs in multiples of ", kHadamardBlock, ", ",
                         kLongestInt8Sum, " at most"),
                    place, "choose such inputs, or --precision bf16 or fp8");
}

}  // namespace

void run_bench_gemm_cuda(const MpiSession& session, const Config& config) {
  const std::unique_ptr<Device> device = open_gpu(session, config);
  std::vector<Product> products = named_product(config.bench);
  if (products.empty()) products = layer_products(config.bench);
  const GpuRates before = measure_gpu_rates(*device);
  struct Result {
    Product product;
    Precision precision;
    TimedRuns time;
    double error;
  };
  std::vector<Result> results;
  DeviceMatmul matmul(device->compute());
  for (const Product& product : products) {
    std::unique_ptr<ProductBench> one;
    session.together([&] {
      check_dimensions(product, config);
      one = std::make_unique<ProductBench>(*device, matmul, product);
    });
    for (const Precision precision : chosen_precisions(config, device->info(), product)) {
      wait_for_all(session);
      TimedRuns time;
      session.together([&] { time = one->time(precision, config.bench.repeats); });  // may not be possible
      results.push_back({product, precision, time, one->error(precision)});
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
    table.add({one.product.name, name_of(one.precision), one.product.rows, one.product.outputs,
               one.product.inputs, median, spread_over_ranks(session, one.time.min_seconds).min,
               one.product.flops() / median / 1e12, 100 * one.product.flops() / median / rate, one.error});
  }
  report.add_table("products", table, "share of the bf16 rate below; error of sampled entries against fp64");
  report_rates(report, session, rates);
  report.publish(session, config.bench.json);
  session.together([&] {
    for (const Result& one : results)
      check(one.error <= most_error(one.precision, one.product),
            text("the product that was timed is right: ", one.product.name, ", relative error ", one.error));
  });
}

}  // namespace longhalo

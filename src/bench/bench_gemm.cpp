#include "bench/bench_gemm.hpp"

#include <algorithm>
#include <cmath>
#include <random>

#include "app/model_setup.hpp"
#include "bench/bench.hpp"
#include "bench/timed_runs.hpp"
#include "core/error.hpp"
#include "device/host_buffer.hpp"

namespace longhalo {
namespace {

constexpr int kSamples = 64;
constexpr double kRateSeconds = 1.0;
constexpr double kMostError = 1e-4;  // fp32 sums of tens of thousands of terms

HostBuffer<float> random_values(int64_t count, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  HostBuffer<float> values(count, "benchmark input");
  for (float& value : values.span())
    value = normal(generator);
  return values;
}

}  // namespace

std::vector<Product> named_product(const Config::Bench& bench) {
  if (bench.outputs == 0) return {};
  return {{"given", bench.tokens, bench.outputs, bench.inputs}};
}

std::vector<Product> layer_products(const Config::Bench& bench) {
  constexpr int64_t kHidden = 4096, kFfn = 14336, kQueries = 4096, kKeysAndValues = 2048;
  const int64_t n = bench.tokens;
  return {{"queries", n, kQueries, kHidden},
          {"keys and values", n, kKeysAndValues, kHidden},
          {"attention output", n, kHidden, kQueries, Accumulate::kAdd},
          {"gate and up", n, 2 * kFfn, kHidden},
          {"down", n, kHidden, kFfn, Accumulate::kAdd}};
}

BenchTable product_table() {
  return BenchTable({{"product", ""},
                     {"precision", ""},
                     {"rows", ""},
                     {"outputs", ""},
                     {"inputs", ""},
                     {"median_seconds", "s"},
                     {"min_seconds", "s"},
                     {"tflops", "TFLOP/s"},
                     {"matmul_percent", "%"},
                     {"relative_error", ""}});
}

double sampled_product_error(const Product& product, const ProductEntry& entry) {
  std::mt19937_64 generator(6);
  std::uniform_int_distribution<int64_t> any_row(0, product.rows - 1), any_output(0, product.outputs - 1);
  double difference = 0, norm = 0;
  for (int sample = 0; sample < kSamples; ++sample) {
    const int64_t row = any_row(generator);
    const auto [found, exact] = entry(row, any_output(generator));
    difference += std::pow(found - exact, 2);
    norm += exact * exact;
  }
  return finite_or_infinite(std::sqrt(difference / norm));
}

void run_bench_gemm_cpu(const MpiSession& session, const Config& config) {
  const int threads = use_threads(session, config);
  const double before = measure_matmul_rate(kRateSeconds);
  const std::vector<Product> products = named_product(config.bench);
  std::vector<TimedRuns> times;
  std::vector<double> errors;
  for (const Product& product : products) {
    HostBuffer<float> a, w, c;
    session.together([&] {
      a = random_values(product.rows * product.inputs, 1);
      w = random_values(product.outputs * product.inputs, 2);
      c = HostBuffer<float>(product.rows * product.outputs, "benchmark result");
    });
    const auto poison = [&] { std::fill(c.span().begin(), c.span().end(), std::nanf("")); };
    times.push_back(time_on_cpu(session, config.bench.repeats, poison, [&] {
      matmul(product.rows, product.outputs, product.inputs, a.data(), w.data(), c.data());
    }));
    errors.push_back(sampled_product_error(product, [&](int64_t row, int64_t output) {
      double exact = 0;
      for (int64_t i = 0; i < product.inputs; ++i)
        exact += static_cast<double>(a[row * product.inputs + i]) * w[output * product.inputs + i];
      return std::pair<double, double>(c[row * product.outputs + output], exact);
    }));
  }
  const double rate = spread_over_ranks(session, (before + measure_matmul_rate(kRateSeconds)) / 2).mean;

  BenchReport report("matrix products, fp32, CPU");
  report.add("ranks", session.ranks(), "", "each runs all products at the same time");
  report.add("threads_per_rank", threads);
  report.add("repeats", config.bench.repeats, "", "median of these");
  report.add("matmul_tflops", rate / 1e12, "TFLOP/s", "a large sgemm, before and after; a rank");
  BenchTable table = product_table();
  for (size_t i = 0; i < products.size(); ++i) {
    const Product& product = products[i];
    const double median = spread_over_ranks(session, times[i].median_seconds).mean;
    errors[i] = spread_over_ranks(session, errors[i]).max;
    table.add({product.name, "fp32", product.rows, product.outputs, product.inputs, median,
               spread_over_ranks(session, times[i].min_seconds).min, product.flops() / median / 1e12,
               100 * product.flops() / median / rate, errors[i]});
  }
  if (!table.empty()) report.add_table("products", table, "times: mean over ranks");
  report.publish(session, config.bench.json);
  session.together([&] {
    for (const double error : errors)
      check(error <= kMostError, "the matrix product that was timed is right within 1e-4");
  });
}

}  // namespace longhalo

// `longhalo bench attention` on a GPU: keys and values lie as in a prefill, interleaved rows [2, H_kv, d],
// and queries come as in one, multiplied with exponent_factor(d).
#include <algorithm>
#include <random>

#include "app/device_setup.hpp"
#include "app/model_setup.hpp"
#include "bench/attention_check.hpp"
#include "bench/bench.hpp"
#include "bench/bench_attention_gradient.hpp"
#include "bench/bench_report.hpp"
#include "bench/device_timer.hpp"
#include "bench/gpu_rates.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "device/device_buffer.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/random/fill_normal.hpp"

namespace longhalo {
namespace {

constexpr double kMostError = 5e-3;  // bf16 in and out: 2^-9 a rounding, of probabilities and of results
constexpr double kMostGradientError = 1e-2;
constexpr int64_t kSamples = 64;           // rows that are checked
constexpr int64_t kSampledKeys = 1 << 20;  // at most this many keys are read for them, or so, but
constexpr int64_t kLeastSamples = 8;

// One set of inputs and outputs; several rotate where they are small.
struct Arrays {
  DeviceBuffer<BFloat16> q, out;
  std::vector<DeviceBuffer<BFloat16>> rows;  // by band, [count, 2, H_kv, d]
  std::vector<BandKeys<BFloat16>> bands;
  Attention<BFloat16> problem;
};

class Setup {
 public:
  Setup(Device& device, const Config::Bench& bench, const AttentionPattern& pattern)
      : stream_(device.compute()), bench_(bench), bias_values_(static_cast<size_t>(bench.heads)) {
    std::mt19937_64 generator(4);
    std::normal_distribution<float> normal;
    for (float& bias : bias_values_)
      bias = normal(generator);
    bias_ = to_device<float>(bias_values_, "landmark bias", stream_);
    lse_ = DeviceBuffer<float>(bench.heads * bench.tokens, "log sums", stream_);
    make_arrays(pattern, 0);
    const int64_t copies = rotating_copies(bytes_moved());
    for (int64_t copy = 1; copy < copies; ++copy)
      make_arrays(pattern, copy);
  }

  const Attention<BFloat16>& problem(int64_t run) const {
    return arrays_[static_cast<size_t>(run) % arrays_.size()].problem;
  }

  /// Every input read once and every output written once.
  int64_t bytes_moved() const {
    const Arrays& one = arrays_.front();
    int64_t bytes = one.q.bytes() + one.out.bytes() + lse_.bytes();
    for (const auto& rows : one.rows)
      bytes += rows.bytes();
    return bytes;
  }

  /// Runs the kernel once over a poisoned result and compares a sample of it.
  double checked_error(AttentionKernel kernel) {
    Arrays& one = arrays_.front();
    check_cuda(cudaMemsetAsync(one.out.data(), 0xff, static_cast<size_t>(one.out.bytes()), stream_),
               "poisoning");
    attention_forward(stream_, one.problem, kernel);
    check_cuda(cudaStreamSynchronize(stream_), "attention");
    int64_t seen = 1;  // keys by the last query, which sees most
    for (const BandKeys<BFloat16>& keys : one.bands)
      seen += visible_keys(keys.band, bench_.first_query + bench_.tokens - 1).count();
    return sampled_attention_error(reader(), std::clamp(kSampledKeys / seen, kLeastSamples, kSamples), 5);
  }

 private:
  void make_arrays(const AttentionPattern& pattern, int64_t copy) {
    const int64_t row = bench_.kv_heads * bench_.head_dim, n = bench_.tokens;
    const auto random = [&](int64_t count, float deviation, const char* purpose) {
      DeviceBuffer<BFloat16> values(count, purpose, stream_);
      fill_normal(stream_, count, static_cast<uint64_t>(copy), next_array_++, deviation, values.data());
      return values;
    };
    Arrays one;
    one.q = random(n * bench_.heads * bench_.head_dim, exponent_factor(bench_.head_dim), "queries");
    one.out = DeviceBuffer<BFloat16>(one.q.size(), "attention output", stream_);
    one.bands = existing_keys<BFloat16>(pattern.bands, bench_.first_query, n);
    for (BandKeys<BFloat16>& keys : one.bands) {
      one.rows.push_back(random(keys.count * 2 * row, 1, "keys and values"));
      keys.k = one.rows.back().data();
      if (keys.count > 0) keys.v = keys.k + row;
      keys.row_stride = 2 * row;
    }
    arrays_.push_back(std::move(one));
    Attention<BFloat16>& problem = arrays_.back().problem;
    problem.heads = bench_.heads;
    problem.kv_heads = bench_.kv_heads;
    problem.head_dim = bench_.head_dim;
    problem.scale = kExponentScale;
    problem.queries = n;
    problem.first_query = bench_.first_query;
    problem.q = arrays_.back().q.data();
    problem.bands = arrays_.back().bands;
    problem.landmark_bias = bias_.data();
    problem.out = arrays_.back().out.data();
    problem.lse = lse_.data();
  }

  std::vector<BFloat16> fetch(const BFloat16* from, int64_t count) const {
    std::vector<BFloat16> values(static_cast<size_t>(count));
    to_host<BFloat16>(values, from, stream_);
    return values;
  }

  static void widen(const BFloat16* from, int64_t count, std::vector<double>& wide) {
    for (int64_t i = 0; i < count; ++i)
      wide.push_back(to_float(from[i]));
  }

  AttentionReader reader() const {
    const Arrays& one = arrays_.front();
    const int64_t d = bench_.head_dim, row = bench_.kv_heads * d;
    AttentionReader reader;
    reader.heads = bench_.heads;
    reader.kv_heads = bench_.kv_heads;
    reader.head_dim = d;
    reader.scale = one.problem.scale;
    reader.queries = bench_.tokens;
    reader.first_query = bench_.first_query;
    for (const BandKeys<BFloat16>& keys : one.bands)
      reader.bands.push_back({keys.band, nullptr, nullptr, keys.first_key, keys.count, 0});
    reader.landmark_bias.assign(bias_values_.begin(), bias_values_.end());
    const auto row_of = [this, d](const BFloat16* from, int64_t i, int64_t head) {
      std::vector<double> wide;
      widen(fetch(from + (i * bench_.heads + head) * d, d).data(), d, wide);
      return wide;
    };
    reader.query = [row_of, &one](int64_t i, int64_t head) { return row_of(one.q.data(), i, head); };
    reader.result = [row_of, &one](int64_t i, int64_t head) { return row_of(one.out.data(), i, head); };
    reader.keys = [this, &one, d, row](size_t band, int64_t kv_head, int64_t first_row, int64_t count) {
      // Whole rows, all heads: one long copy is faster than many short ones.
      const std::vector<BFloat16> rows = fetch(one.rows[band].data() + first_row * 2 * row, count * 2 * row);
      WideKeys wide;
      for (int64_t i = 0; i < count; ++i) {
        widen(rows.data() + i * 2 * row + kv_head * d, d, wide.k);
        widen(rows.data() + i * 2 * row + row + kv_head * d, d, wide.v);
      }
      return wide;
    };
    return reader;
  }

  cudaStream_t stream_;
  Config::Bench bench_;
  std::vector<float> bias_values_;
  DeviceBuffer<float> bias_, lse_;
  std::vector<Arrays> arrays_;
  uint64_t next_array_ = 0;
};

struct NamedKernel {
  const char* name;
  AttentionKernel kernel;
};

std::vector<NamedKernel> chosen_kernels(const Config::Bench& bench, const DeviceInfo& gpu) {
  const NamedKernel hopper{"hopper", AttentionKernel::kHopper},
      portable{"portable", AttentionKernel::kPortable}, decode{"decode", AttentionKernel::kDecode};
  const bool few = bench.tokens <= kGpuDecodeQueries;
  switch (bench.kernel) {
    case KernelSetting::kAuto:
      return {few ? decode : gpu.is_hopper() ? hopper : portable};
    case KernelSetting::kHopper:
      if (!gpu.is_hopper())
        throw UserError(text("bench.kernel hopper needs compute capability 9.0"),
                        text(gpu.name, " has ", gpu.major, ".", gpu.minor), "choose auto or portable");
      return {hopper};
    case KernelSetting::kPortable:
      return {portable};
    case KernelSetting::kAll:
      break;
  }
  std::vector<NamedKernel> all;
  if (gpu.is_hopper()) all.push_back(hopper);
  all.push_back(portable);
  if (few) all.push_back(decode);
  return all;
}

// What is timed, in useful work, and how far from right it is.
struct Measured {
  std::string name;
  double flops;
  TimedRuns times;
  double error;
};

// Five products a visible pair instead of two.
constexpr double kGradientWork = 2.5;

void measure_gradient(const MpiSession& session, const Config::Bench& bench, cudaStream_t stream,
                      const Setup& setup, const std::vector<NamedKernel>& kernels, double forward_flops,
                      std::vector<Measured>& measured) {
  AttentionGradientRun gradient(stream, setup.problem(0));
  const auto measure = [&](const NamedKernel& one, bool deterministic, const char* name) {
    const double error =
        spread_over_ranks(session, gradient.difference_from_portable(one.kernel, deterministic)).max;
    wait_for_all(session);
    const TimedRuns times =
        time_on_device(stream, bench.repeats, [&](int64_t) { gradient.run(one.kernel, deterministic); });
    measured.push_back({text(one.name, name), kGradientWork * forward_flops, times, error});
  };
  for (const NamedKernel& one : kernels) {
    if (one.kernel == AttentionKernel::kDecode) continue;
    const bool is_hopper = one.kernel == AttentionKernel::kHopper;
    measure(one, !is_hopper, " backward");
    if (is_hopper) measure(one, true, " backward, deterministic");
  }
}

}  // namespace

void run_bench_attention_cuda(const MpiSession& session, const Config& config) {
  const std::unique_ptr<Device> device = open_gpu(session, config);
  const AttentionPattern pattern = attention_pattern(config);
  const Config::Bench& bench = config.bench;
  std::unique_ptr<Setup> setup;
  std::vector<NamedKernel> kernels;
  session.together([&] {
    if (bench.head_dim != 64 && bench.head_dim != 128)
      throw UserError("the GPU's attention takes head dimension 64 or 128",
                      text("bench.head_dim ", bench.head_dim),
                      "set bench.head_dim (--head-dim) to 64 or 128, or run.device: cpu");
    kernels = chosen_kernels(bench, device->info());
    setup = std::make_unique<Setup>(*device, bench, pattern);
  });
  const double flops = 4.0 * static_cast<double>(bench.head_dim * bench.heads) *
                       static_cast<double>(visible_pairs(setup->problem(0)));
  const auto moved = static_cast<double>(setup->bytes_moved());

  const GpuRates before = measure_gpu_rates(*device);
  std::vector<Measured> measured;
  for (const NamedKernel& one : kernels) {
    wait_for_all(session);
    const TimedRuns times = time_on_device(device->compute(), bench.repeats, [&](int64_t run) {
      attention_forward(device->compute(), setup->problem(run), one.kernel);
    });
    measured.push_back(
        {one.name, flops, times, spread_over_ranks(session, setup->checked_error(one.kernel)).max});
  }
  const auto forward_count = static_cast<std::ptrdiff_t>(measured.size());
  if (bench.backward) measure_gradient(session, bench, device->compute(), *setup, kernels, flops, measured);
  const GpuRates rates = mean_of(before, measure_gpu_rates(*device));

  BenchReport report("attention, bf16, CUDA");
  report.add("device", device->info().name);
  report.add("tokens", bench.tokens);
  report.add("first_query", bench.first_query, "", "position of the first token");
  report.add("heads", bench.heads);
  report.add("kv_heads", bench.kv_heads);
  report.add("head_dim", bench.head_dim);
  report.add("bands", pattern.describe(), "", "{stride, near, far}");
  report.add("ranks", session.ranks(), "", "each runs the whole problem at the same time");
  report.add("repeats", bench.repeats, "", "median of these");
  report.add("useful_tflop", flops / 1e12, "TFLOP", "4 d a visible pair and query head; backward 10 d");
  BenchTable table({{"kernel", ""},
                    {"median_seconds", "s"},
                    {"min_seconds", "s"},
                    {"useful_tflops", "TFLOP/s"},
                    {"matmul_percent", "%"},
                    {"copy_percent", "%"},
                    {"relative_error", ""}});
  const double matmul = spread_over_ranks(session, rates.matmul_flops).mean;
  const double copy = spread_over_ranks(session, rates.copy_bytes_per_second).mean;
  for (const Measured& one : measured) {
    const double median = spread_over_ranks(session, one.times.median_seconds).mean;
    const bool is_forward = one.flops == flops;
    table.add({one.name, median, spread_over_ranks(session, one.times.min_seconds).min,
               one.flops / median / 1e12, 100 * one.flops / median / matmul,
               is_forward ? nlohmann::json(100 * moved / median / copy) : nlohmann::json(), one.error});
  }
  report.add_table("kernels", table,
                   "shares of the two rates below; error of sampled rows: forward against fp64, backward "
                   "against the portable kernel");
  report_rates(report, session, rates);
  report.publish(session, bench.json);
  session.together([&] {
    for (std::ptrdiff_t i = 0; i < std::ssize(measured); ++i)
      check(measured[static_cast<size_t>(i)].error <= (i < forward_count ? kMostError : kMostGradientError),
            "the attention that was timed is right");
  });
}

}  // namespace longhalo

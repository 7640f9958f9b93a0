#include <algorithm>
#include <cmath>
#include <random>

#include "app/model_setup.hpp"
#include "bench/attention_check.hpp"
#include "bench/bench.hpp"
#include "bench/bench_report.hpp"
#include "bench/timed_runs.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "device/host_buffer.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/matmul/matmul.hpp"

namespace longhalo {
namespace {

constexpr double kRateSeconds = 1.0;
constexpr int64_t kSamples = 64;     // rows that are checked
constexpr double kMostError = 1e-5;  // fp32, sums over thousands of keys

HostBuffer<float> random_values(int64_t count, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  HostBuffer<float> values(count, "benchmark input");
  for (float& value : values.span())
    value = normal(generator);
  return values;
}

// Inputs and problem of one benchmark: the whole sequence on one rank.
struct Setup {
  Attention<float> problem;
  std::vector<BandKeys<float>> bands;
  std::vector<HostBuffer<float>> memory;

  Setup(const Config::Bench& bench, const AttentionPattern& pattern) {
    const int64_t n = bench.tokens, row = bench.kv_heads * bench.head_dim;
    memory.push_back(random_values(n * bench.heads * bench.head_dim, 1));
    bands = existing_keys<float>(pattern.bands, bench.first_query, n);
    for (BandKeys<float>& keys : bands) {
      memory.push_back(random_values(keys.count * row, 2));
      keys.k = memory.back().data();
      memory.push_back(random_values(keys.count * row, 3));
      keys.v = memory.back().data();
    }
    memory.push_back(random_values(bench.heads, 4));
    problem.landmark_bias = memory.back().data();
    memory.emplace_back(n * bench.heads * bench.head_dim, "attention output");
    problem.out = memory.back().data();
    problem.heads = bench.heads;
    problem.kv_heads = bench.kv_heads;
    problem.head_dim = bench.head_dim;
    problem.scale = 1 / std::sqrt(static_cast<float>(bench.head_dim));
    problem.queries = n;
    problem.first_query = bench.first_query;
    problem.q = memory.front().data();
    problem.bands = bands;
  }

  AttentionReader reader() const {
    AttentionReader reader;
    reader.heads = problem.heads;
    reader.kv_heads = problem.kv_heads;
    reader.head_dim = problem.head_dim;
    reader.scale = 1 / std::sqrt(static_cast<double>(problem.head_dim));
    reader.queries = problem.queries;
    reader.first_query = problem.first_query;
    for (const BandKeys<float>& keys : bands)
      reader.bands.push_back({keys.band, nullptr, nullptr, keys.first_key, keys.count, 0});
    reader.landmark_bias.assign(problem.landmark_bias, problem.landmark_bias + problem.heads);
    const auto row_of = [this](const float* from, int64_t row, int64_t head) {
      const float* first = from + (row * problem.heads + head) * problem.head_dim;
      return std::vector<double>(first, first + problem.head_dim);
    };
    reader.query = [=, this](int64_t row, int64_t head) { return row_of(problem.q, row, head); };
    reader.result = [=, this](int64_t row, int64_t head) { return row_of(problem.out, row, head); };
    reader.keys = [this](size_t band, int64_t kv_head, int64_t first_row, int64_t count) {
      WideKeys wide;
      for (int64_t row = first_row; row < first_row + count; ++row) {
        const int64_t at = (row * problem.kv_heads + kv_head) * problem.head_dim;
        wide.k.insert(wide.k.end(), bands[band].k + at, bands[band].k + at + problem.head_dim);
        wide.v.insert(wide.v.end(), bands[band].v + at, bands[band].v + at + problem.head_dim);
      }
      return wide;
    };
    return reader;
  }
};

}  // namespace

void run_bench_attention_cpu(const MpiSession& session, const Config& config) {
  const int threads = use_threads(session, config);
  const AttentionPattern pattern = attention_pattern(config);
  const Config::Bench& bench = config.bench;
  session.together([&] {
    if (bench.backward)
      throw UserError("the gradient is measured on CUDA only", "bench.backward",
                      "set run.device: cuda, or leave --backward out");
  });
  Setup setup(bench, pattern);

  const auto poison = [&] {
    std::fill_n(setup.problem.out, bench.tokens * bench.heads * bench.head_dim, std::nanf(""));
  };
  const TimedRuns timed =
      time_on_cpu(session, bench.repeats, poison, [&] { attention_forward(setup.problem); });
  const double median = spread_over_ranks(session, timed.median_seconds).mean;
  wait_for_all(session);
  const double matmul = spread_over_ranks(session, measure_matmul_rate(kRateSeconds)).mean;
  const double flops = 4.0 * static_cast<double>(bench.head_dim * bench.heads) *
                       static_cast<double>(visible_pairs(setup.problem));
  const double error = spread_over_ranks(session, sampled_attention_error(setup.reader(), kSamples, 5)).max;

  BenchReport report("attention forward, fp32, CPU");
  report.add("tokens", bench.tokens);
  report.add("first_query", bench.first_query, "", "position of the first token");
  report.add("heads", bench.heads);
  report.add("kv_heads", bench.kv_heads);
  report.add("head_dim", bench.head_dim);
  report.add("bands", pattern.describe(), "", "{stride, near, far}");
  report.add("ranks", session.ranks(), "", "each runs the whole problem at the same time");
  report.add("threads_per_rank", threads);
  report.add("median_seconds", median, "s", text("of ", bench.repeats, " runs, mean over ranks"));
  report.add("attention_gflops", flops / median / 1e9, "GFLOP/s",
             "useful: 4 d a visible pair and head; a rank");
  report.add("matmul_gflops", matmul / 1e9, "GFLOP/s", "a large sgemm, measured in this run; a rank");
  report.add("attention_over_matmul", flops / median / matmul, "", "ratio of the two");
  report.add("relative_error", error, "", text("of ", kSamples, " rows of a head against fp64"));
  report.publish(session, bench.json);
  session.together([&] { check(error <= kMostError, "the attention that was timed is right within 1e-5"); });
}

}  // namespace longhalo

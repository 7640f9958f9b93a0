#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "app/bench.hpp"
#include "app/bench_report.hpp"
#include "app/model_setup.hpp"
#include "core/clock.hpp"
#include "core/text.hpp"
#include "device/host_buffer.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/matmul/matmul.hpp"

namespace longhalo {
namespace {

constexpr double kRateSeconds = 1.0;

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
    for (const Band& band : pattern.bands) {
      const int64_t keys = n / band.stride;
      memory.push_back(random_values(keys * row, 2));
      memory.push_back(random_values(keys * row, 3));
      bands.push_back({band, memory[memory.size() - 2].data(), memory.back().data(), 0, keys});
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
    problem.q = memory.front().data();
    problem.bands = bands;
  }

  // Relative error of a few whole rows against the fp64 reference.
  double error_of_samples() const {
    std::vector<std::vector<double>> wide_memory;
    std::vector<BandKeys<double>> wide;
    const auto widen = [&](const float* values, int64_t count) {
      wide_memory.emplace_back(values, values + count);
      return wide_memory.back().data();
    };
    wide_memory.reserve(2 * bands.size() + 2);
    const int64_t kv_row = problem.kv_heads * problem.head_dim, q_row = problem.heads * problem.head_dim;
    for (const BandKeys<float>& band : bands)
      wide.push_back({band.band, widen(band.k, band.count * kv_row), widen(band.v, band.count * kv_row),
                      band.first_key, band.count});
    const double* bias = widen(problem.landmark_bias, problem.heads);
    double difference = 0, norm = 0;
    for (const int64_t i : {int64_t{0}, problem.queries / 3, problem.queries / 2, problem.queries - 1}) {
      const std::vector<double> q(problem.q + i * q_row, problem.q + (i + 1) * q_row);
      std::vector<double> out(static_cast<size_t>(q_row));
      Attention<double> row;
      row.heads = problem.heads;
      row.kv_heads = problem.kv_heads;
      row.head_dim = problem.head_dim;
      row.scale = 1 / std::sqrt(static_cast<double>(problem.head_dim));
      row.queries = 1;
      row.first_query = i;
      row.q = q.data();
      row.bands = wide;
      row.landmark_bias = bias;
      row.out = out.data();
      attention_reference(row);
      for (int64_t c = 0; c < q_row; ++c) {
        const double exact = out[static_cast<size_t>(c)];
        difference += std::pow(problem.out[i * q_row + c] - exact, 2);
        norm += exact * exact;
      }
    }
    return std::sqrt(difference / norm);
  }
};

}  // namespace

void run_bench_attention(const MpiSession& session, const Config& config) {
  const int threads = use_threads(session, config);
  const AttentionPattern pattern = attention_pattern(config);
  const Config::Bench& bench = config.bench;
  Setup setup(bench, pattern);

  std::vector<double> seconds;
  for (int64_t repeat = 0; repeat <= bench.repeats; ++repeat) {  // the first warms up
    std::fill_n(setup.problem.out, bench.tokens * bench.heads * bench.head_dim, std::nanf(""));
    check_mpi(MPI_Barrier(session.comm()), "MPI_Barrier");
    const Stopwatch watch;
    attention_forward(setup.problem);
    if (repeat > 0) seconds.push_back(watch.seconds());
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = spread_over_ranks(session, seconds[seconds.size() / 2]).mean;
  check_mpi(MPI_Barrier(session.comm()), "MPI_Barrier");
  const double matmul = spread_over_ranks(session, measure_matmul_rate(kRateSeconds)).mean;
  const double flops = 4.0 * static_cast<double>(bench.head_dim * bench.heads) *
                       static_cast<double>(visible_pairs(setup.problem));
  const double error = spread_over_ranks(session, setup.error_of_samples()).max;

  BenchReport report("attention forward, fp32, CPU");
  report.add("tokens", bench.tokens);
  report.add("heads", text(bench.heads, "/", bench.kv_heads, " x ", bench.head_dim), "",
             "query/KV heads x head dim");
  report.add("bands", pattern.describe(), "", "{stride, near, far}");
  report.add("ranks", session.ranks(), "", "each runs the whole problem at the same time");
  report.add("threads_per_rank", threads);
  report.add("median_seconds", median, "s", text("of ", bench.repeats, " runs, mean over ranks"));
  report.add("attention_gflops", flops / median / 1e9, "GFLOP/s",
             "useful: 4 d a visible pair and head; a rank");
  report.add("matmul_gflops", matmul / 1e9, "GFLOP/s", "a large sgemm, measured in this run; a rank");
  report.add("attention_over_matmul", flops / median / matmul, "", "ratio of the two");
  report.add("relative_error", error, "", "of four whole rows against the fp64 reference");
  report.publish(session, bench.json);
}

}  // namespace longhalo

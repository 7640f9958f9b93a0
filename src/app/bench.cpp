#include "app/bench.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace longhalo {
namespace {

constexpr Shortcut kRepeats{"--repeats", "bench.repeats", "Timed runs"};
constexpr Shortcut kJson{"--json", "bench.json", "Write the result as JSON to this file"};
constexpr Shortcut kTokens{"--tokens", "bench.tokens", "Length of the sequence"};
constexpr Shortcut kWindow{"--window", "attention.window", "Window W in tokens"};
constexpr Shortcut kStride{"--stride", "attention.landmark_stride",
                           "Landmark stride S in tokens, 0 for none"};
constexpr Shortcut kBands{"--bands", "attention.bands", "Bands, e.g. \"[[1, 0, 4096], [64, 4096, inf]]\""};
constexpr Shortcut kModel{"--model", "model.path", "Model directory"};

std::vector<Benchmark> make_benchmarks() {
  std::vector<Benchmark> all;
  all.push_back({Subcommand::kBenchAttention,
                 "attention",
                 "The attention kernel alone",
                 {kTokens,
                  kRepeats,
                  kWindow,
                  kStride,
                  kBands,
                  kJson,
                  {"--heads", "bench.heads", "Query heads"},
                  {"--kv-heads", "bench.kv_heads", "Key/value heads"},
                  {"--head-dim", "bench.head_dim", "Head dimension"},
                  {"--first-query", "bench.first_query", "Position of the first query"},
                  {"--kernel", "bench.kernel", "auto, hopper, portable or all, on CUDA"}},
                 run_bench_attention});
  all.push_back({Subcommand::kBenchPrefill,
                 "prefill",
                 "A whole prefill of random tokens",
                 {kTokens, kRepeats, kWindow, kStride, kBands, kJson, kModel},
                 run_bench_prefill});
  return all;
}

}  // namespace

std::span<const Benchmark> benchmarks() {
  static const std::vector<Benchmark> all = make_benchmarks();
  return all;
}

void run_benchmark(const MpiSession& session, Subcommand subcommand, const Config& config) {
  const auto found = std::find_if(benchmarks().begin(), benchmarks().end(),
                                  [&](const Benchmark& one) { return one.subcommand == subcommand; });
  check(found != benchmarks().end(), "every subcommand of bench is in the list of benchmarks");
  found->run(session, config);
}

}  // namespace longhalo

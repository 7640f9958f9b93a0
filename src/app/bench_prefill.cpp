#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "app/bench.hpp"
#include "app/bench_report.hpp"
#include "app/device_setup.hpp"
#include "app/model_setup.hpp"
#include "app/plan.hpp"
#include "core/clock.hpp"
#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "model/decoder.hpp"
#include "model/prefill.hpp"
#include "telemetry/memory.hpp"

namespace longhalo {
namespace {

std::vector<int32_t> random_document(int64_t tokens, int64_t vocabulary) {
  std::mt19937_64 generator(5);
  std::vector<int32_t> document(static_cast<size_t>(tokens));
  for (int32_t& token : document)
    token = static_cast<int32_t>(generator() % static_cast<uint64_t>(vocabulary));
  return document;
}

// Tokens that a check reads: enough for every band to be seen, few enough to take seconds.
int64_t checked_tokens(const AttentionPattern& pattern, int64_t tokens) {
  int64_t enough = 600;
  for (const Band& band : pattern.bands)
    enough = std::max(enough, std::min<int64_t>(band.near + 2 * band.stride, 4096));
  return std::min(tokens, enough);
}

// Reads the beginning of the document over all ranks and, on its own, by each rank's decoder: the same
// logits?
double error_against_decoder(const MpiSession& session, const Weights& weights,
                             const AttentionPattern& pattern, std::span<const int32_t> document,
                             int64_t tile) {
  const int64_t tokens = checked_tokens(pattern, static_cast<int64_t>(document.size()));
  const std::span<const int32_t> beginning = document.first(static_cast<size_t>(tokens));
  const ShardPlan shards = plan_shards(weights.config, pattern, tokens, session.ranks());
  Prefill prefill(session, weights, pattern, shards, tile);
  std::optional<Context> context = prefill.run(beginning, KeepContext::kYes);
  Decoder after_prefill(weights, pattern, tile), alone(weights, pattern, tile);
  const std::span<const int32_t> next = document.first(1);
  Context from_nothing(weights.config, pattern);
  alone.extend(from_nothing, beginning);
  const std::span<const float> a = after_prefill.extend(*context, next);
  const std::span<const float> b = alone.extend(from_nothing, next);
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return spread_over_ranks(session, std::sqrt(difference / norm)).max;
}

}  // namespace

void run_bench_prefill(const MpiSession& session, const Config& config) {
  const int threads = use_threads(session, config);
  const AttentionPattern pattern = attention_pattern(config);
  ModelConfig shape;
  session.together([&] { shape = model_shape(config); });
  const Weights weights = model_weights(session, config, shape, pattern);
  const int64_t tokens = config.bench.tokens;
  const std::vector<int32_t> document = random_document(tokens, shape.vocabulary);
  const ShardPlan shards = plan_shards(weights.config, pattern, tokens, session.ranks());

  const double rate = measured_matmul_rate(session);
  const JobPlan plan =
      plan_document(session, weights, pattern, shards, token_tile(config, RunDevice::kCpu), rate, {}, 1);
  session.together([&] { plan.require_memory(); });
  if (session.is_root()) log_info(plan.describe());

  std::vector<double> seconds;
  PrefillCost cost;
  for (int64_t repeat = 0; repeat < config.bench.repeats; ++repeat) {
    Prefill prefill(session, weights, pattern, shards, token_tile(config, RunDevice::kCpu));
    Progress progress("prefill", tokens, ProgressUnit::kTokens, progress_options(session, config));
    check_mpi(MPI_Barrier(session.comm()), "MPI_Barrier");
    const Stopwatch watch;
    prefill.run(document, KeepContext::kNo, [&](int64_t done, int64_t total) {
      progress.set(static_cast<int64_t>(static_cast<double>(tokens) * static_cast<double>(done) /
                                        static_cast<double>(total)));
    });
    seconds.push_back(spread_over_ranks(session, watch.seconds()).max);
    cost = prefill.cost();
  }
  const int64_t resident = process_memory().peak_resident;
  const double rate_after = measured_matmul_rate(session);
  const double error =
      error_against_decoder(session, weights, pattern, document, token_tile(config, RunDevice::kCpu));

  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  const PrefillFlops flops = prefill_flops(shape, pattern, tokens);
  const double mean_rate = (rate + rate_after) / 2;
  const double residual_bytes = 4.0 * static_cast<double>(plan.tokens_per_rank * shape.hidden);
  const auto mean_of = [&](double value) { return spread_over_ranks(session, value).mean; };

  BenchReport report("prefill, fp32, CPU");
  report.add("tokens", tokens);
  report.add("model", text(shape.layers, " layers, D ", shape.hidden, ", F ", shape.ffn, ", H ", shape.heads,
                           "/", shape.kv_heads, " x ", shape.head_dim));
  report.add("bands", pattern.describe(), "", "{stride, near, far}");
  report.add("ranks", session.ranks());
  report.add("threads_per_rank", threads);
  report.add("median_seconds", median, "s", text("of ", config.bench.repeats, " runs, slowest rank"));
  report.add("tokens_per_second", static_cast<double>(tokens) / median, "tokens/s");
  report.add("matmul_gflops", mean_rate / 1e9, "GFLOP/s",
             "a large sgemm on all ranks at once, before and after");
  report.add("products_gflop", flops.products / 1e9, "GFLOP", "the layers' weight products");
  report.add("attention_gflop", flops.attention / 1e9, "GFLOP", "attention's two products, visible pairs");
  report.add("products_only_seconds", flops.total() / mean_rate, "s", "all products alone at the sgemm rate");
  report.add("time_over_products", median * mean_rate / flops.total(), "", "median over that");
  report.add("keys_seconds", mean_of(cost.layers.keys), "s",
             "norm, K and V, pooling, rotary; last run, mean");
  report.add("queries_seconds", mean_of(cost.layers.queries), "s", "norm, Q, rotary");
  report.add("attention_seconds", mean_of(cost.layers.attention), "s");
  report.add("mlp_seconds", mean_of(cost.layers.mlp), "s", "output projection, norm, MLP");
  report.add(
      "attention_over_matmul",
      flops.attention / session.ranks() / mean_of(cost.layers.attention) / (mean_rate / session.ranks()), "");
  report.add("exposed_seconds", spread_over_ranks(session, cost.exposed_seconds()).max, "s",
             "waiting for messages, slowest rank");
  report.add("halo_bytes", sum_over_ranks(session, cost.halo.received_bytes), "B", "received, all ranks");
  report.add("landmark_bytes", sum_over_ranks(session, cost.landmarks.received_bytes), "B",
             "received, all ranks");
  report.add("weights_mb", static_cast<double>(weights.bytes()) / 1e6, "MB", "a rank");
  report.add("residual_mb", residual_bytes / 1e6, "MB", "a rank");
  report.add("peak_resident_mb", spread_over_ranks(session, static_cast<double>(resident)).max / 1e6, "MB",
             "of the largest rank, after the prefill");
  report.add(
      "beyond_weights_residual_mb",
      spread_over_ranks(session, static_cast<double>(resident - weights.bytes()) - residual_bytes).max / 1e6,
      "MB");
  report.add("relative_error", error, "",
             text("logits after ", checked_tokens(pattern, tokens),
                  " tokens: all ranks together against one alone"));
  report.publish(session, config.bench.json);
}

}  // namespace longhalo

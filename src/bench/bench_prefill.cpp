// `longhalo bench prefill`: a whole prefill of random tokens over all ranks; `longhalo bench layer`: the same
// with one layer, and what each of its phases reaches.
#include <algorithm>
#include <cmath>
#include <random>

#include "app/agreed_model.hpp"
#include "app/engine_setup.hpp"
#include "app/model_setup.hpp"
#include "app/plan.hpp"
#include "bench/bench.hpp"
#include "bench/bench_report.hpp"
#include "core/clock.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
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

// What all ranks together make of the beginning of the document, against what one decoder makes of it alone.
struct Difference {
  double logits = 0;  // relative, after the beginning
  double scores = 0;  // nats, largest of a few tokens spread over the beginning
};

double log_probability(std::span<const float> logits, int32_t token) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits)
    sum += std::exp(logit - top);
  return logits[static_cast<size_t>(token)] - top - std::log(sum);
}

double relative_difference(std::span<const float> a, std::span<const float> b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / norm);
}

Difference difference_from_decoder(const MpiSession& session, Engine& engine,
                                   std::span<const int32_t> document, int64_t tile) {
  constexpr int64_t kPortions = 16;
  const int64_t tokens = checked_tokens(engine.pattern(), static_cast<int64_t>(document.size()));
  const std::span<const int32_t> beginning = document.first(static_cast<size_t>(tokens));
  const ShardPlan shards = plan_shards(engine.config(), engine.pattern(), tokens, session.ranks());
  std::unique_ptr<Reading> reading = engine.read(shards, tile);
  reading->prefill(beginning, KeepContext::kYes);
  const std::unique_ptr<DocumentContext> context = reading->take_context();
  const std::vector<float> scores = reading->scores(beginning);  // on rank 0
  reading.reset();

  const std::span<const int32_t> next = document.first(1);
  const std::unique_ptr<Continuation> together = engine.continue_from(*context);
  together->extend(next);
  const std::vector<float> after_all(together->logits().begin(), together->logits().end());

  const std::unique_ptr<DocumentContext> nothing = engine.empty_context();
  const std::unique_ptr<Continuation> alone = engine.continue_from(*nothing);
  Difference worst;
  for (int64_t portion = 0; portion < kPortions; ++portion) {
    const int64_t begin = tokens * portion / kPortions, end = tokens * (portion + 1) / kPortions;
    if (begin == end) continue;
    alone->extend(beginning.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)));
    if (end == tokens || !session.is_root()) continue;
    const double expected = log_probability(alone->logits(), beginning[static_cast<size_t>(end)]);
    worst.scores = std::max(worst.scores, std::abs(scores[static_cast<size_t>(end)] - expected));
  }
  alone->extend(next);
  worst.logits = relative_difference(after_all, alone->logits());
  return {spread_over_ranks(session, worst.logits).max, spread_over_ranks(session, worst.scores).max};
}

// Timed prefills of one document, with the rates of this machine before and after.
struct Measured {
  JobPlan plan;
  std::vector<double> seconds;  // slowest rank, sorted
  PrefillCost cost;             // of the last run
  MatmulRates rates;            // of all ranks together
  DeviceMemoryUse device;
  int64_t resident_bytes = 0;
  Difference difference;
  double median() const { return seconds[seconds.size() / 2]; }
};

Measured measure(const MpiSession& session, const Config& config, Engine& engine) {
  const int64_t tokens = config.bench.tokens;
  const ShardPlan shards = plan_shards(engine.config(), engine.pattern(), tokens, session.ranks());

  Measured measured;
  const MatmulRates before = measured_matmul_rates(session, engine);
  measured.plan = plan_document(session, engine, shards, config.run.token_tile, before, {});
  session.together([&] { measured.plan.require_memory(); });
  if (session.is_root()) log_info(measured.plan.describe());

  const std::vector<int32_t> document = random_document(tokens, engine.config().vocabulary);
  for (int64_t repeat = 0; repeat < config.bench.repeats; ++repeat) {
    const std::unique_ptr<Reading> reading = engine.read(shards, measured.plan.tile);
    Progress progress("prefill", tokens, ProgressUnit::kTokens, progress_options(session, config));
    wait_for_all(session);
    const Stopwatch watch;
    reading->prefill(document, KeepContext::kNo, [&](int64_t done, int64_t total) {
      progress.set(static_cast<int64_t>(static_cast<double>(tokens) * static_cast<double>(done) /
                                        static_cast<double>(total)));
    });
    measured.seconds.push_back(spread_over_ranks(session, watch.seconds()).max);
    measured.cost = reading->cost();
    measured.device = engine.device_memory();
  }
  std::sort(measured.seconds.begin(), measured.seconds.end());
  measured.resident_bytes = process_memory().peak_resident;
  const MatmulRates after = measured_matmul_rates(session, engine);
  measured.rates = {(before.products + after.products) / 2, (before.attention + after.attention) / 2};
  measured.difference = difference_from_decoder(session, engine, document, measured.plan.tile);
  return measured;
}

void report_setting(BenchReport& report, const MpiSession& session, const Engine& engine, int threads,
                    const Measured& measured) {
  const ModelConfig& c = engine.config();
  report.add("tokens", measured.plan.tokens);
  report.add("model", text(c.layers, " layers, D ", c.hidden, ", F ", c.ffn, ", H ", c.heads, "/", c.kv_heads,
                           " x ", c.head_dim));
  report.add("bands", engine.pattern().describe(), "", "{stride, near, far}");
  report.add("ranks", session.ranks());
  report.add("device", engine.device(), "", "of rank 0");
  report.add("transport", engine.transport());
  report.add("threads_per_rank", threads);
  report.add("token_tile", measured.plan.tile, "tokens");
}

void report_time(BenchReport& report, const Measured& measured, const PrefillFlops& flops) {
  const double median = measured.median();
  const double alone = products_alone_seconds(flops, measured.rates);
  const double ranks = measured.plan.ranks;
  report.add("median_seconds", median, "s", text("of ", measured.seconds.size(), " runs, slowest rank"));
  report.add("min_seconds", measured.seconds.front(), "s");
  report.add("tokens_per_second", static_cast<double>(measured.plan.tokens) / median, "tokens/s");
  report.add("useful_tflops", flops.total() / median / ranks / 1e12, "TFLOP/s",
             "products and attention; a rank");
  report.add("matmul_gflops", measured.rates.products / 1e9, "GFLOP/s",
             "a large product as the layers', all ranks at once, before and after");
  report.add("products_gflop", flops.products / 1e9, "GFLOP", "the layers' weight products");
  report.add("attention_gflop", flops.attention / 1e9, "GFLOP", "attention's two products, visible pairs");
  report.add("products_only_seconds", alone, "s", "all products alone at the measured rates");
  report.add("time_over_products", median / alone, "", "median over that");
  report.add("mfu", alone / median, "", "the inverse: share of the measured rates");
}

// Time by phase over ranks, and what each phase's useful products reach.
void report_phases(BenchReport& report, const MpiSession& session, const ModelConfig& c,
                   const Measured& measured, const PrefillFlops& flops) {
  const double token_layers = static_cast<double>(measured.plan.tokens) * static_cast<double>(c.layers);
  struct Row {
    const char* name;
    double seconds, flops, rate;
    const char* meaning;
  };
  const auto products = [&](int64_t weights) { return 2.0 * static_cast<double>(weights) * token_layers; };
  const LayerTimes& times = measured.cost.layers;
  const double products_rate = measured.rates.products / measured.plan.ranks;
  const double attention_rate = measured.rates.attention / measured.plan.ranks;
  BenchTable table({{"phase", ""},
                    {"min", "s"},
                    {"mean", "s"},
                    {"max", "s"},
                    {"useful_tflops", "TFLOP/s"},
                    {"share_of_matmul", ""}});
  for (const Row& row :
       {Row{"keys", times.keys, products(2 * c.hidden * c.kv_size()), products_rate,
            "norm, K and V, pooling, rotary; last run, mean"},
        {"queries", times.queries, products(c.hidden * c.q_size()), products_rate, "norm, Q, rotary"},
        {"attention", times.attention, flops.attention, attention_rate, "attention alone"},
        {"mlp", times.mlp, products(c.hidden * (c.q_size() + 3 * c.ffn)), products_rate,
         "output projection, norm, MLP"}}) {
    const RankSpread spread = spread_over_ranks(session, row.seconds);
    const double rate = row.flops / measured.plan.ranks / spread.mean;
    table.add({row.name, spread.min, spread.mean, spread.max, rate / 1e12, rate / row.rate});
    report.add(text(row.name, "_seconds"), spread.mean, "s", row.meaning);
    if (row.name == std::string("attention")) report.add("attention_over_matmul", rate / row.rate, "");
  }
  report.add_table("phases", table, "over ranks, last run");
}

void report_communication(BenchReport& report, const MpiSession& session, const Measured& measured) {
  const PrefillCost& cost = measured.cost;
  const double exposed = spread_over_ranks(session, cost.exposed_seconds()).max;
  report.add("exposed_seconds", exposed, "s", "waiting for messages, slowest rank");
  report.add("exposed_share", exposed / measured.median(), "", "of the median");
  report.add("transfer_seconds",
             spread_over_ranks(session, cost.halo.transfer_seconds + cost.landmarks.transfer_seconds).max,
             "s", "of messages, hidden or not; 0 where it is not timed");
  report.add("halo_bytes", sum_over_ranks(session, cost.halo.received_bytes), "B", "received, all ranks");
  report.add("landmark_bytes", sum_over_ranks(session, cost.landmarks.received_bytes), "B",
             "received, all ranks");
}

void report_memory(BenchReport& report, const MpiSession& session, const Measured& measured) {
  const auto most = [&](double value) { return spread_over_ranks(session, value).max; };
  const auto item = [&](const std::string& name) {
    for (const MemoryItem& one : measured.plan.items)
      if (one.name == name) return static_cast<double>(one.bytes);
    return 0.0;
  };
  const double weights = item("weights"), residual = item("residual stream");
  const auto resident = static_cast<double>(measured.resident_bytes);
  report.add("weights_mb", weights / 1e6, "MB", "a rank");
  report.add("residual_mb", residual / 1e6, "MB", "a rank");
  report.add("planned_mb", static_cast<double>(measured.plan.bytes()) / 1e6, "MB",
             "a rank, all items of the plan");
  report.add("peak_resident_mb", most(resident) / 1e6, "MB",
             "host memory of the largest rank, after the prefill");
  if (measured.device.reserved_bytes == 0) {
    report.add("beyond_weights_residual_mb", most(resident - weights - residual) / 1e6, "MB");
    return;
  }
  report.add("device_peak_mb", most(static_cast<double>(measured.device.arrays_bytes)) / 1e6, "MB",
             "GPU memory in arrays, largest rank");
  report.add("device_reserved_mb", most(static_cast<double>(measured.device.reserved_bytes)) / 1e6, "MB",
             "taken from the card");
  report.add("device_fragmentation", most(measured.device.fragmentation), "",
             "share of it that no array filled");
}

void run(const MpiSession& session, const Config& config, const std::string& name,
         std::optional<int64_t> layers) {
  const int threads = use_threads(session, config);
  const AttentionPattern pattern = attention_pattern(config);
  ModelConfig shape = agreed_model(session, config).shape;
  shape.layers = layers.value_or(shape.layers);
  const std::unique_ptr<Engine> engine = make_engine(session, config, shape, pattern);
  load_weights(session, config, *engine, random_document(calibration_tokens(*engine), shape.vocabulary));
  const Measured measured = measure(session, config, *engine);
  const PrefillFlops flops = prefill_flops(shape, pattern, config.bench.tokens);

  BenchReport report(text(name, ", ", name_of(engine->precision()), ", ", engine->device()));
  report_setting(report, session, *engine, threads, measured);
  report_time(report, measured, flops);
  report_phases(report, session, shape, measured, flops);
  report_communication(report, session, measured);
  report_memory(report, session, measured);
  report.add("relative_error", measured.difference.logits, "",
             text("logits after ", checked_tokens(pattern, config.bench.tokens),
                  " tokens: all ranks together against one alone"));
  report.add("score_error", measured.difference.scores, "nats",
             "log-probabilities of a few tokens on the way there");
  report.publish(session, config.bench.json);
}

}  // namespace

void run_bench_prefill(const MpiSession& session, const Config& config) {
  run(session, config, "prefill", std::nullopt);
}

void run_bench_layer(const MpiSession& session, const Config& config) {
  run(session, config, "layer", 1);
}

}  // namespace longhalo

// `longhalo bench step` on GPUs: one training step of a model's shape on random tokens over all ranks, beside
// the rate of matrix products measured in the same run. The learning rate is 0, so that all steps do the same
// work; the loss of all of them is then the same number.
#include <algorithm>
#include <cmath>
#include <random>

#include "app/agreed_model.hpp"
#include "app/device_setup.hpp"
#include "app/engine_setup.hpp"
#include "app/model_setup.hpp"
#include "app/training_setup.hpp"
#include "bench/bench.hpp"
#include "bench/bench_report.hpp"
#include "bench/gpu_rates.hpp"
#include "core/clock.hpp"
#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "model/cuda_training_engine.hpp"
#include "model/device_weights.hpp"
#include "model/prefill.hpp"

namespace longhalo {
namespace {

// dq is rounded to bf16, by 2^-9 of itself, after sums whose last bits depend on their order.
constexpr double kMostNormChange = 0x1p-9;

struct RandomSequence {
  RandomSequence(int64_t count, int64_t vocabulary) : doc_start(static_cast<size_t>(count)) {
    std::mt19937_64 generator(7);
    for (int64_t i = 0; i < count; ++i)
      tokens.push_back(static_cast<int32_t>(generator() % static_cast<uint64_t>(vocabulary)));
    labels.assign(tokens.begin() + 1, tokens.end());
    labels.push_back(kIgnoredLabel);
  }
  TrainingSequence view() const { return {tokens, labels, doc_start}; }
  std::vector<int32_t> tokens, labels;
  std::vector<int64_t> doc_start;
};

struct Measured {
  std::vector<double> seconds;  // slowest rank, sorted
  StepTimes before, after;      // the last step
  StepResult result;
  GpuRates rates;
  PoolUse memory;
  bool same = true;  // the loss of all steps, and the norm but for the order in which attention adds up dq
  double median() const { return seconds[seconds.size() / 2]; }
};

void report_times(BenchReport& report, const MpiSession& session, const Measured& measured) {
  BenchTable table({{"phase", ""}, {"min", "s"}, {"mean", "s"}, {"max", "s"}});
  const TrainingTimes &after = measured.after.pass, &before = measured.before.pass;
  for (const auto& [name, seconds] :
       {std::pair{"forward", after.forward - before.forward}, std::pair{"loss", after.loss - before.loss},
        std::pair{"backward", after.backward - before.backward},
        std::pair{"optimizer", measured.after.optimizer - measured.before.optimizer},
        std::pair{"waiting_for_store", after.store - before.store}}) {
    const RankSpread spread = spread_over_ranks(session, seconds);
    table.add({name, spread.min, spread.mean, spread.max});
  }
  report.add_table("phases", table,
                   "over ranks, last step; waiting for the store is the host's, within the others");
}

}  // namespace

void run_bench_step_cuda(const MpiSession& session, const Config& config) {
  const ModelConfig shape = agreed_model(session, config).shape;
  const AttentionPattern pattern = attention_pattern(config);
  session.together([&] {
    if (const auto objection = device_shape_objection(shape, Precision::kBf16, "the model"))
      throw UserError(*objection);
  });
  const int64_t tokens = config.bench.tokens;
  const ShardPlan shards = plan_shards(shape, pattern, tokens, session.ranks());  // outlives the engine
  std::unique_ptr<ActivationStore> store;                                         // this, too
  std::unique_ptr<Device> opened = open_gpu(session, config);
  Device& device = *opened;  // the engine keeps it
  const std::unique_ptr<TrainingEngine> engine =
      make_cuda_training_engine(session, std::move(opened), transport_choice(config), shape, pattern);
  const TrainingPlan plan =
      plan_training_job(session, config, *engine, tokens, 1, Scratch::kClear, Checkpoints::kNo);
  session.together([&] { plan.require(); });
  if (session.is_root()) log_info(plan.describe());

  Measured measured;
  GpuRates first_rates;
  session.together([&] { first_rates = measure_gpu_rates(device); });
  memory_pool().reset_high_marks();
  session.together([&] { engine->load_weights(weights_request(config, pattern)); });
  store = make_activation_store(session, config, *engine, plan, shards.shard(session.rank()).size());
  TrainingEngineOptions options;
  options.trainer.schedule = {ScheduleShape::kCosine, 0, 0, 0, 0, 1};
  options.trainer.checkpointing = {store.get(), plan.task.every};
  options.tile = plan.task.tile;
  options.deterministic = config.train.deterministic;
  engine->begin(shards, options);
  const RandomSequence sequence(tokens, shape.vocabulary);
  for (int64_t repeat = 0; repeat <= config.bench.repeats; ++repeat) {
    const StepResult last = measured.result;
    measured.before = engine->times();
    wait_for_all(session);
    const Stopwatch watch;
    measured.result = engine->step(repeat + 1, std::vector{sequence.view()});
    device.synchronize();
    const double seconds = spread_over_ranks(session, watch.seconds()).max;
    measured.after = engine->times();
    if (repeat == 0) continue;  // it chose how products are made
    measured.seconds.push_back(seconds);
    if (repeat > 1)
      measured.same = measured.same && last.loss == measured.result.loss &&
                      std::abs(last.gradient_norm - measured.result.gradient_norm) <=
                          kMostNormChange * measured.result.gradient_norm;
  }
  measured.memory = memory_pool().use();
  session.together([&] { measured.rates = mean_of(first_rates, measure_gpu_rates(device)); });
  std::sort(measured.seconds.begin(), measured.seconds.end());

  const TrainingFlops flops = training_flops(shape, pattern, tokens, Recompute::kYes, plan.task.every);
  const double median = measured.median(), ranks = session.ranks();
  const double rate = spread_over_ranks(session, measured.rates.matmul_flops).mean * ranks;
  BenchReport report("training step, bf16, GPU");
  report.add("tokens", tokens);
  report.add("model", text(shape.layers, " layers, D ", shape.hidden, ", F ", shape.ffn, ", H ", shape.heads,
                           "/", shape.kv_heads, " x ", shape.head_dim, ", V ", shape.vocabulary));
  report.add("bands", pattern.describe(), "", "{stride, near, far}");
  report.add("ranks", session.ranks());
  report.add("device", device.info().name, "", "of rank 0");
  report.add("transport", engine->transport(), "", "");
  report.add("token_tile", plan.task.tile, "tokens");
  report.add("activations", name_of(plan.place), "", plan.why);
  report.add("every", plan.task.every, "layers");
  report.add("median_seconds", median, "s", text("of ", measured.seconds.size(), " steps, slowest rank"));
  report.add("min_seconds", measured.seconds.front(), "s");
  report.add("tokens_per_second", static_cast<double>(tokens) / median, "tokens/s");
  report.add("useful_tflops", flops.useful() / median / ranks / 1e12, "TFLOP/s",
             "products and attention, forward and backward; a rank");
  report_rates(report, session, measured.rates);
  report.add("mfu", flops.useful() / rate / median, "", "useful products' share of the measured matmul rate");
  report.add("hardware_utilisation", flops.all() / rate / median, "", "the same with what is computed again");
  report_times(report, session, measured);
  report.add("planned_mb", static_cast<double>(plan.bytes()) / 1e6, "MB", "a rank, all items of the plan");
  report.add("device_peak_mb",
             spread_over_ranks(session, static_cast<double>(measured.memory.used_high_bytes)).max / 1e6, "MB",
             "arrays, largest rank");
  report.add("loss", measured.result.loss, "nats", "of random tokens");
  report.add("gradient_norm", measured.result.gradient_norm);
  report.publish(session, config.bench.json);
  session.together([&] {
    check(
        measured.same && std::isfinite(measured.result.loss) && std::isfinite(measured.result.gradient_norm),
        "steps that do the same have the same loss and gradient");
  });
}

}  // namespace longhalo

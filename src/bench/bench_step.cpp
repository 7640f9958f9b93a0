// `longhalo bench step`: one training step of a model's shape on random tokens over all ranks: time by phase,
// beside the rate of matrix products measured in the same run. The learning rate is 0, so that all steps do
// the same work and the gradients can be held against differences of the loss afterwards.
#include <algorithm>
#include <cmath>
#include <random>

#include "app/agreed_model.hpp"
#include "app/model_setup.hpp"
#include "app/training_setup.hpp"
#include "bench/bench.hpp"
#include "bench/bench_report.hpp"
#include "core/clock.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "kernels/matmul/matmul.hpp"
#include "model/prefill.hpp"
#include "model/trainer.hpp"
#include "telemetry/memory.hpp"

namespace longhalo {
namespace {

// Rounding of the loss, and what is not linear in it, are both a few thousandths of its change at most.
constexpr double kLossChange = 0.0005;
constexpr double kMostGradientError = 0.01;

struct RandomSequence {
  std::vector<int32_t> tokens, labels;
  std::vector<int64_t> doc_start;
  TrainingSequence view() const { return {tokens, labels, doc_start}; }
};

RandomSequence random_sequence(int64_t count, int64_t vocabulary) {
  std::mt19937_64 generator(7);
  RandomSequence sequence;
  for (int64_t i = 0; i < count; ++i)
    sequence.tokens.push_back(static_cast<int32_t>(generator() % static_cast<uint64_t>(vocabulary)));
  sequence.labels.assign(sequence.tokens.begin() + 1, sequence.tokens.end());
  sequence.labels.push_back(kIgnoredLabel);
  sequence.doc_start.assign(static_cast<size_t>(count), 0);
  return sequence;
}

Weights make_weights(const MpiSession& session, const Config& config, const ModelConfig& shape,
                     const AttentionPattern& pattern) {
  const auto strided = static_cast<int64_t>(pattern.strides().size());
  const LandmarkWeights landmarks{strided, config.attention.landmark_bias};
  Weights weights;
  session.together([&] {
    weights = config.model.weights == WeightsSource::kCheckpoint
                  ? load_weights(config.model.path, shape, landmarks)
                  : random_weights(shape, landmarks, static_cast<uint64_t>(config.model.seed));
    add_landmark_queries(weights, strided);
  });
  return weights;
}

// The gradients of all ranks together, in place.
void add_over_ranks(const MpiSession& session, const std::vector<Parameter>& gradients) {
  constexpr size_t kMost = size_t{1} << 24;
  for (const Parameter& gradient : gradients)
    for (size_t at = 0; at < gradient.values.size(); at += kMost) {
      const std::span<float> part = gradient.values.subspan(at, std::min(kMost, gradient.values.size() - at));
      const Waiting waiting("a sum of gradients");
      check_mpi(MPI_Allreduce(MPI_IN_PLACE, part.data(), static_cast<int>(part.size()), MPI_FLOAT, MPI_SUM,
                              session.comm()),
                "MPI_Allreduce");
    }
}

// By how much the loss changes between two points on either side of the weights, along the gradient, and what
// the gradient says about that: their relative difference.
double gradient_error(const MpiSession& session, Weights& weights, Trainer& trainer, const StepResult& step,
                      const RandomSequence& sequence) {
  const std::vector<Parameter> values = parameters_of(weights);
  const std::vector<Parameter> gradients = parameters_of(trainer.gradients());
  add_over_ranks(session, gradients);
  // The product of the gradient and the way that the weights went, as they were rounded.
  const auto move = [&](double by) {
    double product = 0;
    for (size_t p = 0; p < values.size(); ++p)
      for (size_t i = 0; i < values[p].values.size(); ++i) {
        const float before = values[p].values[i], gradient = gradients[p].values[i];
        values[p].values[i] += static_cast<float>(by * gradient);
        product += (static_cast<double>(values[p].values[i]) - before) * gradient;
      }
    return product;
  };
  const std::vector<TrainingSequence> sequences{sequence.view()};
  const double distance = kLossChange / (step.gradient_norm * step.gradient_norm);
  move(distance);
  const double above = trainer.validate(sequences);
  const double expected = move(-2 * distance);
  const double below = trainer.validate(sequences);
  return std::abs((below - above) / expected - 1);
}

struct Measured {
  std::vector<double> seconds;  // slowest rank, sorted
  StepTimes times;              // of the last step
  StepResult result;
  StoreFigures store;
  double rate = 0;  // FLOP/s of all ranks together
  double gradient_error = 0;
  double median() const { return seconds[seconds.size() / 2]; }
};

double matmul_rate(const MpiSession& session) {
  wait_for_all(session);
  return spread_over_ranks(session, measure_matmul_rate(1)).mean * session.ranks();
}

StepTimes difference(const StepTimes& now, const StepTimes& before) {
  StepTimes d;
  d.pass.forward = now.pass.forward - before.pass.forward;
  d.pass.loss = now.pass.loss - before.pass.loss;
  d.pass.backward = now.pass.backward - before.pass.backward;
  d.pass.recompute = now.pass.recompute - before.pass.recompute;
  d.pass.store = now.pass.store - before.pass.store;
  d.optimizer = now.optimizer - before.optimizer;
  d.pass.halo.exposed_seconds = now.pass.halo.exposed_seconds - before.pass.halo.exposed_seconds;
  d.pass.landmarks.exposed_seconds =
      now.pass.landmarks.exposed_seconds - before.pass.landmarks.exposed_seconds;
  d.pass.returned.exposed_seconds = now.pass.returned.exposed_seconds - before.pass.returned.exposed_seconds;
  d.reduction.exposed_seconds = now.reduction.exposed_seconds - before.reduction.exposed_seconds;
  return d;
}

Measured measure(const MpiSession& session, const Config& config, const TrainingEngine& engine,
                 const TrainingPlan& plan) {
  const ModelConfig& shape = plan.task.shape;
  Weights weights = make_weights(session, config, shape, plan.task.pattern);
  const ShardPlan shards = plan_shards(shape, plan.task.pattern, plan.task.tokens, session.ranks());
  const std::unique_ptr<ActivationStore> store =
      make_activation_store(session, config, engine, plan, shards.shard(session.rank()).size());
  TrainerOptions options;
  options.schedule = {ScheduleShape::kCosine, 0, 0, 0, 0, 1};
  options.checkpointing = {store.get(), plan.task.every};
  Trainer trainer(session, weights, plan.task.pattern, shards, plan.task.tile, options);
  const RandomSequence sequence = random_sequence(plan.task.tokens, shape.vocabulary);

  Measured measured;
  double before_rate = 0;
  for (int64_t repeat = 0; repeat <= config.bench.repeats; ++repeat) {
    if (repeat == 1) before_rate = matmul_rate(session);
    const StepTimes before = trainer.times();
    wait_for_all(session);
    const Stopwatch watch;
    measured.result = trainer.step(repeat + 1, std::vector{sequence.view()});
    const double seconds = spread_over_ranks(session, watch.seconds()).max;
    measured.times = difference(trainer.times(), before);
    if (repeat > 0) measured.seconds.push_back(seconds);
  }
  measured.rate = (before_rate + matmul_rate(session)) / 2;
  std::sort(measured.seconds.begin(), measured.seconds.end());
  if (store) measured.store = store->figures();
  measured.gradient_error = gradient_error(session, weights, trainer, measured.result, sequence);
  return measured;
}

void report_setting(BenchReport& report, const MpiSession& session, const TrainingPlan& plan, int threads) {
  const ModelConfig& c = plan.task.shape;
  report.add("tokens", plan.task.tokens);
  report.add("model", text(c.layers, " layers, D ", c.hidden, ", F ", c.ffn, ", H ", c.heads, "/", c.kv_heads,
                           " x ", c.head_dim, ", V ", c.vocabulary));
  report.add("bands", plan.task.pattern.describe(), "", "{stride, near, far}");
  report.add("ranks", session.ranks());
  report.add("threads_per_rank", threads);
  report.add("token_tile", plan.task.tile, "tokens");
  report.add("activations", name_of(plan.place), "", plan.why);
  report.add("every", plan.task.every, "layers");
}

void report_time(BenchReport& report, const Measured& measured, const TrainingPlan& plan) {
  const Recompute again = plan.place == ActivationPlace::kOff ? Recompute::kNo : Recompute::kYes;
  const TrainingFlops flops =
      training_flops(plan.task.shape, plan.task.pattern, plan.task.tokens, again, plan.task.every);
  const double median = measured.median();
  report.add("median_seconds", median, "s", text("of ", measured.seconds.size(), " steps, slowest rank"));
  report.add("min_seconds", measured.seconds.front(), "s");
  report.add("tokens_per_second", static_cast<double>(plan.task.tokens) / median, "tokens/s");
  report.add("useful_tflops", flops.useful() / median / plan.task.ranks / 1e12, "TFLOP/s",
             "products and attention, forward and backward; a rank");
  report.add("matmul_gflops", measured.rate / 1e9, "GFLOP/s",
             "a large product, all ranks at once, before and after");
  report.add("products_gflop", flops.products / 1e9, "GFLOP", "of weights, forward and backward");
  report.add("attention_gflop", flops.attention / 1e9, "GFLOP", "attention's products, visible pairs");
  report.add("recomputed_gflop", (flops.products_again + flops.attention_again) / 1e9, "GFLOP",
             "beside them");
  report.add("products_only_seconds", flops.useful() / measured.rate, "s",
             "the useful products alone at that rate");
  report.add("time_over_products", median * measured.rate / flops.useful(), "", "median over that");
  report.add("time_over_all_products", median * measured.rate / flops.all(), "",
             "the same with what is computed again");
  report.add("mfu", flops.useful() / measured.rate / median, "", "useful products' share of that rate");
}

void report_phases(BenchReport& report, const MpiSession& session, const Measured& measured) {
  BenchTable table({{"phase", ""}, {"min", "s"}, {"mean", "s"}, {"max", "s"}});
  const TrainingTimes& pass = measured.times.pass;
  for (const auto& [name, seconds] :
       {std::pair{"forward", pass.forward}, std::pair{"loss", pass.loss},
        std::pair{"backward", pass.backward}, std::pair{"recompute", pass.recompute},
        std::pair{"optimizer", measured.times.optimizer},
        std::pair{"exposed_halo", pass.halo.exposed_seconds},
        std::pair{"exposed_landmarks", pass.landmarks.exposed_seconds},
        std::pair{"exposed_return", pass.returned.exposed_seconds},
        std::pair{"exposed_reduction", measured.times.reduction.exposed_seconds},
        std::pair{"exposed_store", pass.store}}) {
    const RankSpread spread = spread_over_ranks(session, seconds);
    table.add({name, spread.min, spread.mean, spread.max});
  }
  report.add_table("phases", table,
                   "over ranks, last step; recompute is within backward, exposed times within all");
}

void report_memory(BenchReport& report, const MpiSession& session, const Measured& measured,
                   const TrainingPlan& plan) {
  report.add("planned_mb", static_cast<double>(plan.bytes()) / 1e6, "MB", "a rank, all items of the plan");
  report.add("peak_resident_mb",
             spread_over_ranks(session, static_cast<double>(process_memory().peak_resident)).max / 1e6, "MB",
             "largest rank");
  report.add("stored_bytes", sum_over_ranks(session, measured.store.bytes_put), "B",
             "activations put into the store, all ranks and steps");
}

}  // namespace

void run_bench_step(const MpiSession& session, const Config& config) {
  const int threads = use_threads(session, config);
  const ModelConfig shape = agreed_model(session, config).shape;
  const std::unique_ptr<TrainingEngine> engine =
      make_cpu_training_engine(session, shape, attention_pattern(config));
  const TrainingPlan plan =
      plan_training_job(session, config, *engine, config.bench.tokens, 1, Scratch::kClear);
  session.together([&] { plan.require(); });
  if (session.is_root()) log_info(plan.describe());
  const Measured measured = measure(session, config, *engine, plan);

  BenchReport report("training step, fp32, CPU");
  report_setting(report, session, plan, threads);
  report_time(report, measured, plan);
  report_phases(report, session, measured);
  report_memory(report, session, measured, plan);
  report.add("loss", measured.result.loss, "nats", "of random tokens");
  report.add("gradient_error", measured.gradient_error, "",
             "of the loss's change along the gradient, from its norm");
  report.publish(session, config.bench.json);
  session.together([&] {
    check(!(measured.gradient_error > kMostGradientError) && std::isfinite(measured.result.loss),
          "the gradient that was timed is that of the loss");
  });
}

}  // namespace longhalo

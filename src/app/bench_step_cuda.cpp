// `longhalo bench step` on GPUs: one training step of a model's shape on random tokens over all ranks, beside
// the rate of matrix products measured in the same run. The learning rate is 0, so that all steps do the same
// work; the loss of all of them is then the same number.
#include <algorithm>
#include <cmath>
#include <random>

#include "app/bench.hpp"
#include "app/bench_report.hpp"
#include "app/device_setup.hpp"
#include "app/gpu_rates.hpp"
#include "app/model_setup.hpp"
#include "app/training_setup.hpp"
#include "comm/transport.hpp"
#include "core/clock.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "model/device_trainer.hpp"
#include "model/prefill.hpp"

namespace longhalo {
namespace {

constexpr int64_t kDeviceTile = 8192;
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

// What is asked for; auto is this process's memory, which holds more than a card.
ActivationPlace place_of(ActivationSetting setting) {
  switch (setting) {
    case ActivationSetting::kDevice:
      return ActivationPlace::kDevice;
    case ActivationSetting::kNvme:
      return ActivationPlace::kNvme;
    case ActivationSetting::kOff:
      throw UserError("the GPU's training step always makes activations again", "activations.store: off",
                      "choose device, host or nvme");
    default:
      return ActivationPlace::kHost;
  }
}

struct Measured {
  std::vector<double> seconds;  // slowest rank, sorted
  StepTimes before, after;      // the last step
  StepResult result;
  GpuRates rates;
  PoolUse memory;
  bool same = true;  // the loss of all steps, and the norm but for the order in which attention adds up dq
  double median() const { return seconds[seconds.size() / 2]; }
};

DeviceWeights make_weights(const MpiSession& session, const Config& config, const ModelConfig& shape,
                           int64_t strided, cudaStream_t stream) {
  const LandmarkWeights landmarks{strided, config.attention.landmark_bias};
  DeviceWeights weights;
  session.together([&] {
    weights = config.model.weights == WeightsSource::kCheckpoint
                  ? load_device_weights(config.model.path, shape, landmarks, Precision::kBf16, stream)
                  : random_device_weights(shape, landmarks, static_cast<uint64_t>(config.model.seed),
                                          Precision::kBf16, stream);
    add_landmark_queries(weights, strided, stream);
  });
  return weights;
}

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
  ModelConfig shape;
  session.together([&] { shape = model_shape(config); });
  const AttentionPattern pattern = attention_pattern(config);
  const auto strided = static_cast<int64_t>(pattern.strides().size());
  ActivationPlace place{};
  session.together([&] {
    place = place_of(config.activations.store);
    if (const auto objection = device_shape_objection(shape, Precision::kBf16, "the model"))
      throw UserError(*objection);
  });
  const std::unique_ptr<Device> device = open_gpu(session, config);
  const ChosenTransport chosen = make_transport(session, transport_choice(config), device->info());
  const int64_t tokens = config.bench.tokens, every = config.activations.every;
  const ShardPlan shards = plan_shards(shape, pattern, tokens, session.ranks());
  const int64_t own = shards.shard(session.rank()).size();

  Measured measured;
  GpuRates first_rates;
  session.together([&] { first_rates = measure_gpu_rates(*device); });
  DeviceWeights weights = make_weights(session, config, shape, strided, device->compute());
  const std::unique_ptr<ActivationStore> store =
      place == ActivationPlace::kDevice
          ? nullptr
          : make_activation_store(session, config, place,
                                  device_stored_inputs_shape(shape.layers, own, shape.hidden, every));
  DeviceTrainerOptions options;
  options.schedule = {ScheduleShape::kCosine, 0, 0, 0, 0, 1};
  options.pass.tile = config.run.token_tile > 0 ? config.run.token_tile : kDeviceTile;
  options.pass.every = every;
  options.pass.store = store.get();
  options.pass.deterministic = false;
  DeviceMatmul matmul(device->compute());
  std::unique_ptr<DeviceTrainer> trainer;
  session.together([&] {
    trainer = std::make_unique<DeviceTrainer>(DeviceRoom{*device, *chosen.transport, matmul}, session,
                                              weights, pattern, shards, options);
  });
  const RandomSequence sequence(tokens, shape.vocabulary);
  for (int64_t repeat = 0; repeat <= config.bench.repeats; ++repeat) {
    const StepResult last = measured.result;
    measured.before = trainer->times();
    check_mpi(MPI_Barrier(session.comm()), "MPI_Barrier");
    const Stopwatch watch;
    measured.result = trainer->step(repeat + 1, std::vector{sequence.view()});
    device->synchronize();
    const double seconds = spread_over_ranks(session, watch.seconds()).max;
    measured.after = trainer->times();
    if (repeat == 0) continue;  // it chose how products are made
    measured.seconds.push_back(seconds);
    if (repeat > 1)
      measured.same = measured.same && last.loss == measured.result.loss &&
                      std::abs(last.gradient_norm - measured.result.gradient_norm) <=
                          kMostNormChange * measured.result.gradient_norm;
  }
  measured.memory = memory_pool().use();
  trainer.reset();
  session.together([&] { measured.rates = mean_of(first_rates, measure_gpu_rates(*device)); });
  std::sort(measured.seconds.begin(), measured.seconds.end());

  const TrainingFlops flops = training_flops(shape, pattern, tokens, Recompute::kYes, every);
  const double median = measured.median(), ranks = session.ranks();
  const double rate = spread_over_ranks(session, measured.rates.matmul_flops).mean * ranks;
  BenchReport report("training step, bf16, GPU");
  report.add("tokens", tokens);
  report.add("model", text(shape.layers, " layers, D ", shape.hidden, ", F ", shape.ffn, ", H ", shape.heads,
                           "/", shape.kv_heads, " x ", shape.head_dim, ", V ", shape.vocabulary));
  report.add("bands", pattern.describe(), "", "{stride, near, far}");
  report.add("ranks", session.ranks());
  report.add("device", device->info().name, "", "of rank 0");
  report.add("transport", std::string(chosen.transport->name()), "", chosen.reason);
  report.add("token_tile", options.pass.tile, "tokens");
  report.add("activations", name_of(place));
  report.add("every", every, "layers");
  report.add("median_seconds", median, "s", text("of ", measured.seconds.size(), " steps, slowest rank"));
  report.add("min_seconds", measured.seconds.front(), "s");
  report.add("tokens_per_second", static_cast<double>(tokens) / median, "tokens/s");
  report.add("useful_tflops", flops.useful() / median / ranks / 1e12, "TFLOP/s",
             "products and attention, forward and backward; a rank");
  report_rates(report, session, measured.rates);
  report.add("mfu", flops.useful() / rate / median, "", "useful products' share of the measured matmul rate");
  report.add("hardware_utilisation", flops.all() / rate / median, "", "the same with what is computed again");
  report_times(report, session, measured);
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

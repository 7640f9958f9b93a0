#include "app/step_figures.hpp"

#include "app/plan.hpp"
#include "telemetry/memory.hpp"

namespace longhalo {
namespace {

using nlohmann::json;

struct Kind {
  const char* name;
  const CommCost &now, &before;
};

}  // namespace

StepFigures::StepFigures(const MpiSession& session, const Config& config, const TrainingPlan& plan,
                         const ShardPlan& shards)
    : session_(session),
      watch_(session, config, "train"),
      task_(plan.task),
      matmul_rate_(plan.matmul_rate),
      work_(work_of_shard(plan.task.shape, plan.task.pattern, shards.shard(session.rank()))) {}

void StepFigures::add_step(double seconds) {
  seconds_ += seconds;
  ++steps_;
}

json StepFigures::own_figures(const StepTimes& now, const TrainingEngine& engine, const StoreFigures& store) {
  const TrainingTimes &pass = now.pass, &before = recorded_.pass;
  const Kind kinds[] = {{"halo", pass.halo, before.halo},
                        {"landmarks", pass.landmarks, before.landmarks},
                        {"return", pass.returned, before.returned},
                        {"reduction", now.reduction, recorded_.reduction}};
  json phases{
      {"forward", pass.forward - before.forward},    {"loss", pass.loss - before.loss},
      {"backward", pass.backward - before.backward}, {"recompute", pass.recompute - before.recompute},
      {"exposed_store", pass.store - before.store},  {"optimizer", now.optimizer - recorded_.optimizer}};
  json bytes{{"store_put", store.bytes_put - recorded_store_.bytes_put},
             {"store_fetched", store.bytes_fetched - recorded_store_.bytes_fetched}};
  json transfer = json::object();
  for (const Kind& kind : kinds) {
    phases[std::string("exposed_") + kind.name] = kind.now.exposed_seconds - kind.before.exposed_seconds;
    bytes[kind.name] = kind.now.received_bytes - kind.before.received_bytes;
    transfer[kind.name] = kind.now.transfer_seconds - kind.before.transfer_seconds;
  }
  const DeviceMemoryUse device = engine.device_memory();
  return {{"phases", phases},
          {"bytes", bytes},
          {"transfer_seconds", transfer},
          {"memory",
           {{"peak_resident", process_memory().peak_resident},
            {"peak_device_arrays", device.arrays_bytes},
            {"peak_device_reserved", device.reserved_bytes}}}};
}

json StepFigures::take(TrainingEngine& engine, const ActivationStore* store, RunLog& log) {
  const StepTimes now = engine.times();
  const StoreFigures stored = store != nullptr ? store->figures() : StoreFigures();
  const RankFigures figures = watch_.take(own_figures(now, engine, stored), now.pass.own - recorded_.pass.own,
                                          work_ * static_cast<double>(steps_), log);
  recorded_ = now;
  recorded_store_ = stored;
  json record = json::object();
  if (session_.is_root()) {
    const auto steps = static_cast<double>(steps_);
    const double sequences = steps * static_cast<double>(task_.sequences);
    const TrainingFlops flops =
        training_flops(task_.shape, task_.pattern, task_.tokens, Recompute::kNo, task_.every);
    record = {{"seconds_per_step", seconds_ / steps},
              {"tokens_per_second", sequences * static_cast<double>(task_.tokens) / seconds_},
              {"mfu", sequences * flops.useful() / seconds_ / matmul_rate_},
              {"matmul_flops_per_second", matmul_rate_},
              {"phases", figures.spreads("phases")},
              {"memory", figures.spreads("memory")}};
    const json bytes = figures.spreads("bytes"), transfers = figures.spreads("transfer_seconds");
    for (const auto& [kind, spread] : bytes.items()) {
      const auto sum = static_cast<int64_t>(figures.sum("bytes", kind));
      record["bytes"][kind] = sum;
      total_bytes_[kind] = total_bytes_.value(kind, int64_t{0}) + sum;
    }
    for (const auto& [kind, spread] : transfers.items()) {
      const double sum = figures.sum("transfer_seconds", kind);
      if (sum <= 0) continue;
      record["transfer_seconds"][kind] = spread["mean"];
      record["bandwidth"][kind] = record["bytes"][kind].get<double>() / sum;
    }
  }
  seconds_ = 0;
  steps_ = 0;
  return record;
}

void StepFigures::publish(const json& record) {
  if (!session_.is_root()) return;
  published_ = record;
  PrometheusText figures = watch_.figures();
  const auto gauge = [&](const char* key, const char* name, const char* help) {
    if (record.contains(key)) figures.gauge(name, help, {}, record[key].get<double>());
  };
  gauge("step", "longhalo_step", "Steps done.");
  gauge("loss", "longhalo_loss", "Loss of the newest step, nats a token.");
  gauge("cross_entropy", "longhalo_cross_entropy", "Of the newest step, nats a token.");
  gauge("gradient_norm", "longhalo_gradient_norm", "Of the newest step, before clipping.");
  gauge("learning_rate", "longhalo_learning_rate", "Of the newest step.");
  gauge("skipped_steps", "longhalo_skipped_steps", "Steps whose loss or gradient was not finite.");
  gauge("seconds_per_step", "longhalo_seconds_per_step", "Mean of the steps of the newest record.");
  gauge("tokens_per_second", "longhalo_tokens_per_second", "Of all ranks together.");
  gauge("mfu", "longhalo_mfu", "Useful FLOPs over what the ranks' matrix products reach.");
  gauge("matmul_flops_per_second", "longhalo_matmul_flops_per_second",
        "Of large matrix products of all ranks together, measured at the job's start.");
  if (validation_)
    figures.gauge("longhalo_validation_cross_entropy", "Of the newest validation, nats a token.", {},
                  *validation_);
  add_spreads(figures, "longhalo_phase_seconds", "Seconds by phase in the newest record, over ranks.",
              "phase", record.value("phases", json::object()));
  add_spreads(figures, "longhalo_memory_bytes", "Peaks of memory, over ranks.", "kind",
              record.value("memory", json::object()));
  for (const auto& [kind, bytes] : total_bytes_.items())
    figures.counter("longhalo_bytes_total",
                    "Received by all ranks, or put to and fetched from the store, since the job began.",
                    {{"kind", kind}}, bytes.get<double>());
  const json bandwidth = record.value("bandwidth", json::object());
  for (const auto& [kind, rate] : bandwidth.items())
    figures.gauge("longhalo_bandwidth_bytes_per_second", "Of a rank while it receives, mean of ranks.",
                  {{"kind", kind}}, rate.get<double>());
  watch_.publish(figures);
}

void StepFigures::publish_validation(double cross_entropy) {
  validation_ = cross_entropy;
  publish(json(published_));
}

}  // namespace longhalo

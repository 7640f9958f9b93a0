// What a training record says beside the loss: where time went on which ranks, how much of the machine was
// used, what moved between ranks and to the store, what memory was taken.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "app/run_watch.hpp"
#include "app/training_plan.hpp"
#include "model/training_engine.hpp"
#include "storage/activation_store.hpp"

namespace longhalo {

class StepFigures {
 public:
  /// Collective.
  StepFigures(const MpiSession& session, const Config& config, const TrainingPlan& plan,
              const ShardPlan& shards);

  /// A step that took `seconds`.
  void add_step(double seconds);
  /// Of the steps since the last call; `store` may be nullptr. The keys, on rank 0:
  ///   seconds_per_step, tokens_per_second
  ///   mfu            useful FLOPs (training_flops) over what the ranks' matrix products reach:
  ///   matmul_flops_per_second, large products, measured by all ranks at once at the job's start
  ///   phases         seconds by phase, RankFigures::spread()
  ///   bytes          received by all ranks, or put to and fetched from the store, by kind
  ///   transfer_seconds, bandwidth   by kind, where transfers are timed (on GPUs): mean of ranks, bytes/s
  ///   memory         peaks in bytes by kind, RankFigures::spread()
  /// Link errors and stragglers become records of `log`. Collective.
  nlohmann::json take(TrainingEngine& engine, const ActivationStore* store, RunLog& log);

  /// Rank 0: the newest record, and the newest validation's cross-entropy, to the Prometheus file. An empty
  /// record when the job begins.
  void publish(const nlohmann::json& record);
  void publish_validation(double cross_entropy);
  /// Rank 0: the job ends by itself (RunWatch::end).
  void end() { watch_.end(); }

 private:
  nlohmann::json own_figures(const StepTimes& now, const TrainingEngine& engine, const StoreFigures& store);

  const MpiSession& session_;
  RunWatch watch_;
  TrainingTask task_;
  double matmul_rate_;
  double work_;  // of this rank's shard, in FLOPs
  StepTimes recorded_;
  StoreFigures recorded_store_;
  double seconds_ = 0;
  int64_t steps_ = 0;
  nlohmann::json total_bytes_ = nlohmann::json::object();
  nlohmann::json published_ = nlohmann::json::object();
  std::optional<double> validation_;
};

}  // namespace longhalo

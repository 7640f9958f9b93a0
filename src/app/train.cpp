#include "app/train.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "app/engine_setup.hpp"
#include "app/job_log.hpp"
#include "app/model_setup.hpp"
#include "app/training_data.hpp"
#include "comm/shard_plan.hpp"
#include "core/clock.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "model/engine.hpp"
#include "model/prefill.hpp"
#include "model/save_model.hpp"
#include "model/trainer.hpp"
#include "telemetry/memory.hpp"

namespace longhalo {
namespace {

constexpr int64_t kDefaultTile = 512;

static_assert(kNoLabel == kIgnoredLabel);

TrainingSequence view_of(const PackedSequence& packed) {
  return {packed.tokens, packed.labels, packed.doc_start};
}

TrainerOptions trainer_options(const Config::Train& train) {
  TrainerOptions options;
  options.adamw = {train.beta1, train.beta2, train.epsilon, train.weight_decay};
  options.schedule = {
      train.schedule == ScheduleSetting::kCosine ? ScheduleShape::kCosine : ScheduleShape::kWarmupStableDecay,
      train.learning_rate,
      train.final_learning_rate,
      train.warmup_steps,
      train.decay_steps,
      train.steps};
  options.clip = train.clip;
  options.z_loss = train.z_loss;
  return options;
}

// One job: what all steps share.
class TrainJob {
 public:
  TrainJob(const MpiSession& session, const Config& config);
  void run();

 private:
  void load_weights();
  void step(int64_t number);
  void validate(int64_t step);
  void refuse_endless_skipping(int64_t number) const;
  void save();
  nlohmann::json phases();

  const MpiSession& session_;
  const Config& config_;
  const Config::Train& train_;
  int threads_;
  AttentionPattern pattern_;
  ModelConfig shape_;
  std::unique_ptr<TrainingData> data_;
  std::unique_ptr<RunLog> log_, metrics_;  // rank 0 writes
  Weights weights_;
  std::unique_ptr<ShardPlan> shards_;
  std::unique_ptr<Trainer> trainer_;
  int64_t skipped_ = 0, skipped_in_a_row_ = 0;
  double since_record_seconds_ = 0;
  int64_t since_record_tokens_ = 0;
  StepTimes recorded_;
};

TrainJob::TrainJob(const MpiSession& session, const Config& config)
    : session_(session),
      config_(config),
      train_(config.train),
      threads_(use_threads(session, config)),
      pattern_(attention_pattern(config)) {
  session.together([&] { shape_ = model_shape(config); });
  data_ = std::make_unique<TrainingData>(session, config, shape_.vocabulary);
  const std::filesystem::path folder = config.output.directory;
  session.together([&] {
    if (!session.is_root()) return;
    if (config.output.if_exists == IfExists::kError && std::filesystem::exists(folder / "metrics.jsonl"))
      throw UserError("the output folder holds an earlier training run", folder.string(),
                      "choose another output.directory, or set output.if_exists: replace");
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error)
      throw UserError(text("the output folder cannot be made: ", error.message()), folder.string(),
                      "choose another output.directory");
    std::filesystem::remove(folder / "metrics.jsonl", error);
  });
  const std::unique_ptr<Engine> engine = make_cpu_engine(session, shape_, pattern_);
  log_ = open_job_log(session, config, "train", threads_, *engine);
  metrics_ = std::make_unique<RunLog>();
  session.together([&] {
    if (!session.is_root()) return;
    RunHeader header;
    header.command = "train";
    header.config = nlohmann::json::parse(dump_json(config));
    header.ranks = session.ranks();
    metrics_ = std::make_unique<RunLog>(folder / "metrics.jsonl", header);
  });
  load_weights();
  shards_ =
      std::make_unique<ShardPlan>(plan_shards(shape_, pattern_, train_.sequence_tokens, session.ranks()));
  const int64_t tile = config.run.token_tile == 0 ? kDefaultTile : config.run.token_tile;
  trainer_ = std::make_unique<Trainer>(session, weights_, pattern_, *shards_, tile, trainer_options(train_));
}

void TrainJob::load_weights() {
  const Stopwatch watch;
  const auto strided = static_cast<int64_t>(pattern_.strides().size());
  const LandmarkWeights landmarks{strided, config_.attention.landmark_bias};
  session_.together([&] {
    weights_ = config_.model.weights == WeightsSource::kCheckpoint
                   ? longhalo::load_weights(config_.model.path, shape_, landmarks)
                   : random_weights(shape_, landmarks, static_cast<uint64_t>(config_.model.seed));
    add_landmark_queries(weights_, strided);
  });
  if (session_.is_root())
    log_info(text("model: ", static_cast<double>(elements_of(parameters_of(weights_))) / 1e6,
                  "M parameters, ready in ", watch.seconds(), " s; attention ", pattern_.describe(), "; ",
                  data_->training_tokens(), " tokens to train on, ", data_->validation_tokens(),
                  " to validate on"));
}

void TrainJob::run() {
  Progress progress("training", train_.steps, ProgressUnit::kItems, progress_options(session_, config_));
  for (int64_t number = 1; number <= train_.steps; ++number) {
    step(number);
    progress.set(number);
    const bool last = number == train_.steps;
    if (data_->validation_sequences() > 0 && (last || number % train_.validate_every == 0)) validate(number);
    if (last || (train_.save_every > 0 && number % train_.save_every == 0)) save();
  }
  progress.finish();
  if (session_.is_root()) log_info(text("done: ", config_.output.directory, "/model"));
}

void TrainJob::step(int64_t number) {
  const Stopwatch watch;
  std::vector<PackedSequence> packed;
  session_.together([&] {
    for (int64_t i = 0; i < train_.accumulation; ++i)
      packed.push_back(data_->training().sequence((number - 1) * train_.accumulation + i));
  });
  std::vector<TrainingSequence> sequences;
  for (const PackedSequence& one : packed)
    sequences.push_back(view_of(one));
  const StepResult result = trainer_->step(number, sequences);
  skipped_ += result.skipped ? 1 : 0;
  skipped_in_a_row_ = result.skipped ? skipped_in_a_row_ + 1 : 0;
  since_record_seconds_ += watch.seconds();
  since_record_tokens_ += train_.accumulation * train_.sequence_tokens;

  if (result.skipped || number % train_.log_every == 0 || number == train_.steps) {
    nlohmann::json record{
        {"step", number},
        {"loss", result.loss},
        {"cross_entropy", result.cross_entropy},
        {"perplexity", std::exp(result.cross_entropy)},
        {"gradient_norm", result.gradient_norm},
        {"learning_rate", result.learning_rate},
        {"counted_tokens", result.counted_tokens},
        {"sequences", number * train_.accumulation},
        {"tokens_per_second", static_cast<double>(since_record_tokens_) / since_record_seconds_},
        {"skipped", result.skipped},
        {"skipped_steps", skipped_},
        {"peak_resident_bytes", process_memory().peak_resident},
        {"phases", phases()}};
    metrics_->write("step", record);
    since_record_seconds_ = 0;
    since_record_tokens_ = 0;
  }
  refuse_endless_skipping(number);
}

// Mean over ranks, in seconds since the last record. Collective.
nlohmann::json TrainJob::phases() {
  const StepTimes now = trainer_->times();
  const auto mean = [&](double seconds) { return spread_over_ranks(session_, seconds).mean; };
  nlohmann::json phases{
      {"forward", mean(now.pass.forward - recorded_.pass.forward)},
      {"loss", mean(now.pass.loss - recorded_.pass.loss)},
      {"backward", mean(now.pass.backward - recorded_.pass.backward)},
      {"optimizer", mean(now.optimizer - recorded_.optimizer)},
      {"exposed_halo", mean(now.pass.halo.exposed_seconds - recorded_.pass.halo.exposed_seconds)},
      {"exposed_return", mean(now.pass.returned.exposed_seconds - recorded_.pass.returned.exposed_seconds)},
      {"exposed_reduction", mean(now.reduction.exposed_seconds - recorded_.reduction.exposed_seconds)}};
  recorded_ = now;
  return phases;
}

void TrainJob::refuse_endless_skipping(int64_t number) const {
  if (skipped_in_a_row_ <= train_.most_skipped) return;
  session_.together([&] {
    throw UserError(
        text("loss or gradient were not finite in ", skipped_in_a_row_, " steps in a row, up to step ",
             number, "; what was saved before is untouched"),
        config_.output.directory,
        "go on from the last saved model with a smaller train.learning_rate, a longer warm-up or a "
        "smaller train.clip");
  });
}

void TrainJob::validate(int64_t step) {
  std::vector<PackedSequence> packed;
  session_.together([&] {
    for (int64_t i = 0; i < data_->validation_sequences(); ++i)
      packed.push_back(data_->validation().sequence(i));
  });
  std::vector<TrainingSequence> sequences;
  for (const PackedSequence& one : packed)
    sequences.push_back(view_of(one));
  const double mean = trainer_->validate(sequences);
  metrics_->write("validation", {{"step", step}, {"cross_entropy", mean}, {"perplexity", std::exp(mean)}});
  if (session_.is_root())
    log_info(text("step ", step, ": validation perplexity ", std::exp(mean), ", ", mean, " nats a token"));
}

void TrainJob::save() {
  session_.together([&] {
    if (!session_.is_root()) return;
    save_model(
        weights_, pattern_, std::filesystem::path(config_.output.directory) / "model", config_.model.path,
        config_.model.weights == WeightsSource::kCheckpoint ? OriginConfig::kKeep : OriginConfig::kNew);
  });
}

}  // namespace

void run_train(const MpiSession& session, const Config& config) {
  TrainJob(session, config).run();
}

}  // namespace longhalo

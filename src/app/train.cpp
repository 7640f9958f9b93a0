#include "app/train.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>

#include "app/agreed_model.hpp"
#include "app/continued_metrics.hpp"
#include "app/engine_setup.hpp"
#include "app/job_log.hpp"
#include "app/model_setup.hpp"
#include "app/shared_folder.hpp"
#include "app/signals.hpp"
#include "app/step_figures.hpp"
#include "app/training_checkpoints.hpp"
#include "app/training_data.hpp"
#include "app/training_setup.hpp"
#include "comm/shard_plan.hpp"
#include "core/clock.hpp"
#include "core/file_access.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "model/prefill.hpp"
#include "model/save_model.hpp"
#include "model/training_engine.hpp"
#include "storage/folder_lock.hpp"
#include "telemetry/memory.hpp"

namespace longhalo {
namespace {

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

// In bits for each byte of the text that was to be foreseen, which unlike perplexity compares tokenizers;
// left out where the bytes are not known.
void add_bits_per_byte(nlohmann::json& record, double cross_entropy, int64_t tokens, const TrainingData& data,
                       const std::vector<PackedSequence>& sequences) {
  int64_t bytes = 0;
  for (const PackedSequence& sequence : sequences)
    bytes += data.label_bytes(sequence).value_or(0);
  if (bytes > 0)
    record["bits_per_byte"] =
        cross_entropy * static_cast<double>(tokens) / (std::numbers::ln2 * static_cast<double>(bytes));
}

OriginConfig origin_config(const Config& config) {
  return config.model.weights == WeightsSource::kCheckpoint ? OriginConfig::kKeep : OriginConfig::kNew;
}

// One job: what all steps share.
class TrainJob {
 public:
  TrainJob(const MpiSession& session, const Config& config);
  ExitCode run();

 private:
  void prepare_output();
  void begin_engine();
  std::vector<std::pair<std::string, std::string>> files_beside_weights() const;
  void begin_records();
  void restore();
  bool asked_to_stop();
  void step();
  void validate();
  void refuse_endless_skipping();
  void save();
  ExitCode stop();
  void finish();
  nlohmann::json phases();

  const MpiSession& session_;
  const Config& config_;
  const Config::Train& train_;
  int threads_;
  AttentionPattern pattern_;
  ModelConfig shape_;
  std::unique_ptr<TrainingData> data_;
  std::optional<FolderLock> lock_;  // of the output folder, rank 0's
  std::unique_ptr<TrainingCheckpoints> checkpoints_;
  // As they were at the start: the folder that they come from may change while the job runs. On rank 0.
  std::vector<std::pair<std::string, std::string>> files_;
  std::optional<RestoredCheckpoint> restored_;
  std::unique_ptr<RunLog> log_, metrics_;  // rank 0 writes
  std::unique_ptr<ShardPlan> shards_;
  TrainingPlan plan_;
  std::unique_ptr<ActivationStore> activations_;  // outlives the engine; none where it keeps all itself
  std::unique_ptr<TrainingEngine> engine_;
  TrainingSettings settings_;
  TrainingState state_;
  std::unique_ptr<StepFigures> figures_;
};

TrainJob::TrainJob(const MpiSession& session, const Config& config)
    : session_(session),
      config_(config),
      train_(config.train),
      threads_(use_threads(session, config)),
      pattern_(attention_pattern(config)) {
  shape_ = agreed_model(session, config).shape;
  data_ = std::make_unique<TrainingData>(session, config, shape_.vocabulary);
  engine_ = make_training_engine(session, config, shape_, pattern_);
  plan_ = plan_training_job(session, config, *engine_, train_.sequence_tokens, train_.accumulation,
                            Scratch::kClear);
  session.together([&] { plan_.require(); });
  session.together([&] {
    if (session.is_root()) files_ = files_beside_weights();
  });
  require_job_log(session, config);
  prepare_output();  // after what cannot be: a refused job leaves no folder behind
  if (session.is_root()) checkpoints_->set_files(files_);
  log_ = open_job_log(session, config, "train", threads_, computing_of(*engine_));
  if (session.is_root()) log_info(plan_.describe());
  begin_engine();
  settings_ = TrainingSettings::of(config, pattern_.describe(), fingerprint_of(engine_->parameters()),
                                   data_->fingerprint());
  settings_.fixed["the model's numbers"] = model_numbers(shape_);
  settings_.fixed["the model's heads"] = model_heads(shape_);
  settings_.changed["precision"] = name_of(engine_->precision());
  if (restored_)
    session.together([&] {
      state_ = training_state_of(restored_->manifest.job_state, settings_, restored_->folder.string(),
                                 session.is_root() ? Say::kYes : Say::kNo);
    });
  // Whatever can be refused has been: what an earlier run left is touched from here on.
  begin_records();
  if (restored_) restore();
}

// Makes the folder this job's alone.
void TrainJob::prepare_output() {
  const std::filesystem::path folder = config_.output.directory;
  const auto refuse_earlier_run = [&] {
    if (config_.output.if_exists == IfExists::kError && holds_training_run(folder))
      throw UserError("the output folder holds an earlier training run", folder.string(),
                      "choose another output.directory, or set output.if_exists: resume to go on with it, or "
                      "replace to start anew");
  };
  session_.together([&] {
    if (!session_.is_root()) return;
    refuse_earlier_run();
    make_directory(folder, "the output folder", "choose another output.directory");
    // It is written last, when it is late to hear of it; records, when earlier checkpoints are gone.
    const std::filesystem::path model = folder / "model", metrics = folder / "metrics.jsonl";
    std::error_code error;
    if (std::filesystem::exists(model, error) && !std::filesystem::is_directory(model, error))
      throw UserError("the trained model gets a folder of this name, and a file has it", model.string(),
                      "remove it, or choose another output.directory");
    if (std::filesystem::is_directory(metrics, error))
      throw UserError("the records of steps get a file of this name, and a folder has it", metrics.string(),
                      "move it away, or choose another output.directory");
  });
  // Every rank writes its part of a checkpoint there; the first of those may be hours away.
  const std::optional<SharedFolder> seen = look_at_shared_folder(session_, folder);
  session_.together([&] {
    if (seen && !seen->fault.empty())
      throw UserError(seen->fault, folder.string(), seen->remedy + start_of_relative(folder));
    if (session_.is_root()) lock_.emplace(folder);
  });
  checkpoints_ =
      std::make_unique<TrainingCheckpoints>(session_, folder, static_cast<int>(train_.checkpoint_keep));
  session_.together([&] {
    if (session_.is_root()) refuse_earlier_run();  // of a job that began and ended since
  });
  if (config_.output.if_exists == IfExists::kResume) restored_ = checkpoints_->find();
}

void TrainJob::begin_records() {
  if (config_.output.if_exists == IfExists::kReplace) checkpoints_->remove_all();
  const std::filesystem::path file = std::filesystem::path(config_.output.directory) / "metrics.jsonl";
  metrics_ = std::make_unique<RunLog>();
  const std::vector<std::string> hosts = session_.hosts();
  session_.together([&] {
    if (!session_.is_root()) return;
    RunHeader header;
    header.command = "train";
    header.config = nlohmann::json::parse(dump_json(config_));
    header.ranks = session_.ranks();
    header.hosts = hosts;
    if (restored_) {
      header.extra["resumed_step"] = restored_->manifest.step;
      take_back_metrics(file, restored_->manifest.step);
    } else {
      std::error_code error;
      std::filesystem::remove(file, error);
    }
    metrics_ = std::make_unique<RunLog>(file, header);
  });
}

void TrainJob::begin_engine() {
  const Stopwatch watch;
  session_.together([&] { engine_->load_weights(weights_request(config_, pattern_)); });
  shards_ =
      std::make_unique<ShardPlan>(plan_shards(shape_, pattern_, train_.sequence_tokens, session_.ranks()));
  activations_ =
      make_activation_store(session_, config_, *engine_, plan_, shards_->shard(session_.rank()).size());
  TrainingEngineOptions options{trainer_options(train_), plan_.task.tile, train_.deterministic};
  options.trainer.checkpointing = {activations_.get(), config_.activations.every};
  engine_->begin(*shards_, options);
  figures_ = std::make_unique<StepFigures>(session_, config_, plan_, *shards_);
  int64_t elements = 0;
  for (const ParameterSize& parameter : engine_->parameters())
    elements += parameter.second;
  if (session_.is_root())
    log_info(text("model: ", static_cast<double>(elements) / 1e6, "M parameters, ready in ", watch.seconds(),
                  " s; attention ", pattern_.describe(), "; ", data_->training_tokens(),
                  " tokens to train on, ", data_->validation_tokens(), " to validate on"));
}

std::vector<std::pair<std::string, std::string>> TrainJob::files_beside_weights() const {
  return model_files(shape_, engine_->matrix_type(), pattern_, config_.model.path, origin_config(config_));
}

void TrainJob::restore() {
  std::optional<OptimizerStateReader> reader;
  session_.together([&] { reader.emplace(restored_->optimizer()); });
  engine_->restore(*reader, state_.updates);
  if (session_.is_root())
    log_info(text("goes on from ", restored_->folder.string(), ", written by ", restored_->manifest.ranks,
                  " ranks: step ", state_.step, " of ", train_.steps));
}

ExitCode TrainJob::run() {
  const int64_t before = state_.step;
  Progress progress(before == 0 ? "training" : text("training after step ", before),
                    std::max<int64_t>(train_.steps - before, 0), ProgressUnit::kSteps,
                    progress_options(session_, config_));
  figures_->publish(nlohmann::json::object());
  // Where it starts from, to tell what was learned.
  if (before == 0 && data_->validation_sequences() > 0) validate();
  while (state_.step < train_.steps) {
    if (asked_to_stop()) return stop();
    step();
    progress.set(state_.step - before);
    const bool last = state_.step >= train_.steps;
    if (data_->validation_sequences() > 0 && (last || state_.step % train_.validate_every == 0)) validate();
    if (last) break;
    if (train_.checkpoint_every > 0 && state_.step % train_.checkpoint_every == 0)
      checkpoints_->start(state_, settings_, *engine_, *metrics_);
    if (train_.save_every > 0 && state_.step % train_.save_every == 0) save();
  }
  progress.finish();
  finish();
  return ExitCode::kDone;
}

// At a step boundary: ranks agree on what signals asked of any of them, and on whether the checkpoint under
// way is written on all. One message of 8 bytes a step.
bool TrainJob::asked_to_stop() {
  constexpr uint64_t kStop = 1, kSave = 2, kWriting = 4;
  const uint64_t all = bits_of_ranks(session_, (JobSignals::asked_to_stop() ? kStop : 0) |
                                                   (JobSignals::take_asked_to_save() ? kSave : 0) |
                                                   (checkpoints_->is_writing() ? kWriting : 0));
  if ((all & kStop) != 0) return true;
  if (checkpoints_->is_started() && (all & kWriting) == 0) checkpoints_->commit(*metrics_);
  if ((all & kSave) != 0 && state_.step > 0) checkpoints_->start(state_, settings_, *engine_, *metrics_);
  return false;
}

ExitCode TrainJob::stop() {
  if (state_.step > 0) checkpoints_->save_now(state_, settings_, *engine_, *metrics_);
  metrics_->write("stopped", {{"step", state_.step}});
  figures_->end();
  if (session_.is_root())
    log_info(text("stopped on request after step ", state_.step, " of ", train_.steps,
                  "; go on with output.if_exists: resume"));
  return ExitCode::kRequeue;
}

void TrainJob::finish() {
  // A disk that has no room for the checkpoint may still have room for the model.
  std::optional<JointError> failed;
  try {
    checkpoints_->save_now(state_, settings_, *engine_, *metrics_);
  } catch (const JointError& error) {
    failed = error;
  }
  save();
  if (failed) throw JointError(*failed);
  figures_->end();
  if (session_.is_root()) log_info(text("done: ", config_.output.directory, "/model"));
}

void TrainJob::step() {
  const Stopwatch watch;
  const int64_t number = state_.step + 1;
  at_work("step", number);
  std::vector<PackedSequence> packed;
  session_.together([&] {
    for (int64_t i = 0; i < train_.accumulation; ++i)
      packed.push_back(data_->training().sequence(state_.sequences + i));
  });
  std::vector<TrainingSequence> sequences;
  for (const PackedSequence& one : packed)
    sequences.push_back(view_of(one));
  const StepResult result = engine_->step(number, sequences);
  state_.step = number;
  state_.sequences += train_.accumulation;
  state_.updates = engine_->updates();
  state_.skipped += result.skipped ? 1 : 0;
  state_.skipped_in_a_row = result.skipped ? state_.skipped_in_a_row + 1 : 0;
  figures_->add_step(watch.seconds());

  if (result.skipped || number % train_.log_every == 0 || number == train_.steps) {
    nlohmann::json record{{"step", number},
                          {"loss", result.loss},
                          {"cross_entropy", result.cross_entropy},
                          {"perplexity", std::exp(result.cross_entropy)},
                          {"gradient_norm", result.gradient_norm},
                          {"learning_rate", result.learning_rate},
                          {"counted_tokens", result.counted_tokens},
                          {"sequences", state_.sequences},
                          {"skipped", result.skipped},
                          {"skipped_steps", state_.skipped}};
    add_bits_per_byte(record, result.cross_entropy, result.counted_tokens, *data_, packed);
    record.update(figures_->take(*engine_, activations_.get(), *metrics_));
    metrics_->write("step", record);
    figures_->publish(record);
  }
  refuse_endless_skipping();
}

void TrainJob::refuse_endless_skipping() {
  if (state_.skipped_in_a_row <= train_.most_skipped) return;
  if (checkpoints_->is_started()) checkpoints_->commit(*metrics_);  // of weights that were good
  session_.together([&] {
    throw UserError(text("loss or gradient were not finite in ", state_.skipped_in_a_row,
                         " steps in a row, up to step ", state_.step, "; what was saved before is untouched"),
                    config_.output.directory,
                    "go on with output.if_exists: resume and a smaller train.learning_rate, a longer warm-up "
                    "or a smaller "
                    "train.clip");
  });
}

void TrainJob::validate() {
  std::vector<PackedSequence> packed;
  session_.together([&] {
    for (int64_t i = 0; i < data_->validation_sequences(); ++i)
      packed.push_back(data_->validation().sequence(i));
  });
  std::vector<TrainingSequence> sequences;
  int64_t counted = 0;
  for (const PackedSequence& one : packed)
    counted += sequences.emplace_back(view_of(one)).counted();
  const double mean = engine_->validate(sequences);
  nlohmann::json record{{"step", state_.step},
                        {"cross_entropy", mean},
                        {"perplexity", std::exp(mean)},
                        {"counted_tokens", counted}};
  add_bits_per_byte(record, mean, counted, *data_, packed);
  metrics_->write("validation", record);
  figures_->publish_validation(mean);
  if (session_.is_root())
    log_info(
        text("step ", state_.step, ": validation perplexity ", std::exp(mean), ", ", mean, " nats a token"));
}

void TrainJob::save() {
  constexpr double kSlowDisk = 20e6;  // bytes a second, written and read again
  int64_t elements = 0;
  for (const ParameterSize& parameter : engine_->parameters())
    elements += parameter.second;
  const MorePatience for_the_root(static_cast<double>(elements) * sizeof(float) / kSlowDisk);
  session_.together([&] {
    if (!session_.is_root()) return;
    const ModelTensors model = engine_->model_tensors();
    save_model(model.tensors, model.host_bytes, files_,
               std::filesystem::path(config_.output.directory) / "model");
  });
}

}  // namespace

ExitCode run_train(const MpiSession& session, const Config& config) {
  const JobSignals signals(session.is_root() ? Say::kYes : Say::kNo);
  TrainJob job(session, config);
  return session.or_end_all([&] { return job.run(); });
}

}  // namespace longhalo

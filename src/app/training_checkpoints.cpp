#include "app/training_checkpoints.hpp"

#include "app/signals.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "storage/checkpoint_list.hpp"

namespace longhalo {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFolder = "checkpoints";

RankAgreement agreement_of(const MpiSession& session) {
  return {session.rank(), session.ranks(),
          [&session](const std::function<void()>& work) { session.together(work); },
          [&session](const std::string& value) { return gather_text(session, value); },
          [&session](const std::string& value) { return broadcast_text(session, value); }};
}

}  // namespace

bool holds_training_run(const fs::path& output) {
  return fs::exists(output / "metrics.jsonl") || !list_checkpoints(output / kFolder).empty();
}

TrainingCheckpoints::TrainingCheckpoints(const MpiSession& session, const fs::path& output, int keep)
    : session_(session),
      directory_(output / kFolder),
      ranks_(agreement_of(session)),
      writer_(directory_, ranks_, [keep] {
        CheckpointOptions options;
        options.keep = keep;
        return options;
      }()) {}

void TrainingCheckpoints::remove_all() {
  session_.together([&] {
    if (session_.is_root()) remove_checkpoints(directory_);
  });
}

std::optional<RestoredCheckpoint> TrainingCheckpoints::find() {
  std::optional<RestoredCheckpoint> found = find_checkpoint(directory_, ranks_);
  if (found) last_step_ = found->manifest.step;
  return found;
}

void TrainingCheckpoints::start_or_throw(const TrainingState& state, const TrainingSettings& settings,
                                         TrainingEngine& engine) {
  session_.together([&] { snapshot_.emplace(engine.snapshot(writer_)); });
  CheckpointContents contents;
  contents.step = state.step;
  contents.weights = snapshot_->weights();
  contents.optimizer = snapshot_->optimizer();
  contents.files = files_;
  contents.job_state = job_state_of(state, settings);
  contents.rank_state = nlohmann::json::object();  // nothing is drawn at random once the seeds are fixed
  since_start_ = Stopwatch();
  writer_.start(std::move(contents));
  started_step_ = state.step;
}

void TrainingCheckpoints::commit_or_throw(RunLog& metrics) {
  const Stopwatch watch;
  try {
    const fs::path folder = writer_.commit();
    snapshot_.reset();
    last_step_ = started_step_;
    JobSignals::saving_takes(since_start_.seconds());
    metrics.write("checkpoint", {{"step", last_step_},
                                 {"folder", folder.filename().string()},
                                 {"seconds", since_start_.seconds()},
                                 {"waited_seconds", watch.seconds()}});
  } catch (...) {
    snapshot_.reset();
    throw;
  }
}

void TrainingCheckpoints::warn(const JointError& error, int64_t step, RunLog& metrics) const {
  if (session_.rank() == error.reporting_rank)
    log_warning(text("there is no checkpoint of step ", step, ", the job goes on: ", error.what()));
  metrics.write("checkpoint_failed", {{"step", step}, {"error", error.what()}});
}

void TrainingCheckpoints::start(const TrainingState& state, const TrainingSettings& settings,
                                TrainingEngine& engine, RunLog& metrics) {
  if (is_started()) commit(metrics);
  if (last_step_ == state.step) return;
  try {
    start_or_throw(state, settings, engine);
  } catch (const JointError& error) {
    snapshot_.reset();
    warn(error, state.step, metrics);
  }
}

void TrainingCheckpoints::commit(RunLog& metrics) {
  try {
    commit_or_throw(metrics);
  } catch (const JointError& error) {
    warn(error, started_step_, metrics);
  }
}

void TrainingCheckpoints::save_now(const TrainingState& state, const TrainingSettings& settings,
                                   TrainingEngine& engine, RunLog& metrics) {
  if (is_started()) commit(metrics);
  if (last_step_ == state.step) return;
  start_or_throw(state, settings, engine);
  commit_or_throw(metrics);
}

}  // namespace longhalo

// Checkpoints of a training job in output.directory/checkpoints: written in the background from a copy, at
// most one at a time, committed at a later step boundary (storage/checkpoint_writer.hpp has the order that a
// kill cannot spoil). One that fails costs a warning; the last of a job has to succeed.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "app/training_state.hpp"
#include "comm/mpi_session.hpp"
#include "core/clock.hpp"
#include "model/training_engine.hpp"
#include "storage/checkpoint_restore.hpp"
#include "storage/checkpoint_writer.hpp"
#include "telemetry/run_log.hpp"

namespace longhalo {

/// Whether the folder of results holds a training job's metrics or checkpoints.
bool holds_training_run(const std::filesystem::path& output);

class TrainingCheckpoints {
 public:
  /// Makes the folder and keeps other jobs out of it. Throws UserError on all ranks. Collective.
  TrainingCheckpoints(const MpiSession& session, const std::filesystem::path& output, int keep);

  /// Removes those that are there. Collective.
  void remove_all();
  /// The newest that verifies on all ranks, or nothing; says which newer ones do not. Throws UserError if
  /// there are some and none verifies. Collective.
  std::optional<RestoredCheckpoint> find();

  /// Small files that every checkpoint brings along (config.json, the tokenizer); those of rank 0 count.
  void set_files(std::vector<std::pair<std::string, std::string>> files) { files_ = std::move(files); }

  /// Whether this rank is still writing its parts.
  bool is_writing() const { return writer_.is_started() && !writer_.is_written(); }
  bool is_started() const { return writer_.is_started(); }

  /// Begins one of this moment, once the one before is committed; nothing if the last is of this step. A
  /// failure is a warning. Collective.
  void start(const TrainingState& state, const TrainingSettings& settings, TrainingEngine& engine,
             RunLog& metrics);
  /// Waits for the one that was started and commits it. A failure is a warning. Collective.
  void commit(RunLog& metrics);
  /// There is one of this moment afterwards: throws on all ranks if not. Collective.
  void save_now(const TrainingState& state, const TrainingSettings& settings, TrainingEngine& engine,
                RunLog& metrics);

 private:
  void start_or_throw(const TrainingState& state, const TrainingSettings& settings, TrainingEngine& engine);
  void commit_or_throw(RunLog& metrics);
  void warn(const JointError& error, int64_t step, RunLog& metrics) const;

  const MpiSession& session_;
  std::filesystem::path directory_;
  RankAgreement ranks_;
  std::optional<TrainingSnapshot> snapshot_;  // NOTE: the writer's thread reads it, so it goes after it
  CheckpointWriter writer_;
  std::vector<std::pair<std::string, std::string>> files_;
  int64_t started_step_ = 0, last_step_ = -1;
  Stopwatch since_start_;
};

}  // namespace longhalo

// From the config to a training step that fits: its plan with what this job's hosts have, and the store that
// the plan chose.
#pragma once

#include <filesystem>
#include <memory>

#include "app/training_plan.hpp"
#include "comm/mpi_session.hpp"
#include "model/training_engine.hpp"
#include "storage/activation_store.hpp"

namespace longhalo {

/// activations.directory, else $SLURM_TMPDIR, else $TMPDIR, else /tmp.
std::filesystem::path activations_directory(const Config& config);

/// The batch system's number of this job, for the name of its scratch folder.
std::string job_name();

enum class Scratch { kLeave, kClear };
/// Whether there has to be host memory for the copy that a job checkpoint is written from.
enum class Checkpoints { kNo, kYes };

/// A step of `sequences` sequences of `tokens` tokens, with the least that any rank has; the rate of matrix
/// products is measured for half a second. Where the scratch disk is needed it is looked at; with
/// Scratch::kClear what killed jobs left on it is removed before the room is counted. The same on all ranks,
/// but for the fault of a host's scratch folder. Collective.
TrainingPlan plan_training_job(const MpiSession& session, const Config& config, TrainingEngine& engine,
                               int64_t tokens, int64_t sequences, Scratch scratch,
                               Checkpoints checkpoints = Checkpoints::kYes);

/// The store of the plan for this rank's shard; nullptr where activations are not stored, or in the memory of
/// a device. Throws UserError on all ranks. Collective.
std::unique_ptr<ActivationStore> make_activation_store(const MpiSession& session, const Config& config,
                                                       const TrainingEngine& engine, const TrainingPlan& plan,
                                                       int64_t own_tokens);

/// One of any shape in host memory or on the scratch disk.
std::unique_ptr<ActivationStore> make_activation_store(const MpiSession& session, const Config& config,
                                                       ActivationPlace place, const ActivationShape& shape);

/// `longhalo train --plan`: prints the plan, and throws UserError when it does not fit. Collective.
void print_training_plan(const MpiSession& session, const Config& config);

}  // namespace longhalo

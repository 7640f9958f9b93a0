// From the config to a training step that fits: its plan with what this job's hosts have, and the store that
// the plan chose.
#pragma once

#include <filesystem>
#include <memory>

#include "app/training_plan.hpp"
#include "comm/mpi_session.hpp"
#include "storage/activation_store.hpp"

namespace longhalo {

/// Tokens that go through a layer at once where run.token_tile does not say.
inline constexpr int64_t kTrainingTile = 1024;

/// activations.directory, else $SLURM_TMPDIR, else $TMPDIR, else /tmp.
std::filesystem::path activations_directory(const Config& config);

/// The batch system's number of this job, for the name of its scratch folder.
std::string job_name();

enum class Scratch { kLeave, kClear };

/// A step of `sequences` sequences of `tokens` tokens, with the least that any rank has; the rate of matrix
/// products is measured for half a second. With Scratch::kClear what killed jobs left on the scratch disk is
/// removed first, and the room is counted. The same on all ranks. Collective.
TrainingPlan plan_training_job(const MpiSession& session, const Config& config, const ModelConfig& shape,
                               int64_t tokens, int64_t sequences, Scratch scratch);

/// The store of the plan for this rank's shard; nullptr where activations are not stored. Throws UserError on
/// all ranks. Collective.
std::unique_ptr<ActivationStore> make_activation_store(const MpiSession& session, const Config& config,
                                                       const TrainingPlan& plan, int64_t own_tokens);

/// One of any shape in host memory or on the scratch disk.
std::unique_ptr<ActivationStore> make_activation_store(const MpiSession& session, const Config& config,
                                                       ActivationPlace place, const ActivationShape& shape);

/// `longhalo train --plan`: prints the plan, and throws UserError when it does not fit. Collective.
void print_training_plan(const MpiSession& session, const Config& config);

}  // namespace longhalo

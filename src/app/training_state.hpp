// Where a training job stands, and what must be as it was for the job to go on from there.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "config/config.hpp"
#include "core/log.hpp"
#include "model/model_config.hpp"

namespace longhalo {

/// The same on every rank. With weights, optimizer state and data it fixes everything that follows.
struct TrainingState {
  int64_t step = 0;       // steps done, those that were skipped included
  int64_t sequences = 0;  // of the training data, read so far: the number of the next one
  int64_t updates = 0;    // of the optimizer
  int64_t skipped = 0;    // steps, because loss or gradient were not finite
  int64_t skipped_in_a_row = 0;
};

/// What a checkpoint says of the job that made it, beside its TrainingState.
struct TrainingSettings {
  nlohmann::json fixed;    // by key: goes on only where all are the same
  nlohmann::json changed;  // by key: may differ, which is said

  /// `parameters`, `data`: fingerprints of the model's arrays and of what is read.
  static TrainingSettings of(const Config& config, const std::string& attention,
                             const std::string& parameters, const std::string& data);
};

/// What a model computes with beside its arrays: with another of these, the same weights are another
/// function.
nlohmann::json model_numbers(const ModelConfig& model);
/// How its arrays are cut into heads, which their sizes alone do not tell.
nlohmann::json model_heads(const ModelConfig& model);

nlohmann::json job_state_of(const TrainingState& state, const TrainingSettings& settings);

/// Back from a checkpoint of `folder`. Throws UserError that lists what differs where it is of another job,
/// where it is of a later step than train.steps, and for what is no such state; logs (`say`) what else has
/// changed.
TrainingState training_state_of(const nlohmann::json& job_state, const TrainingSettings& settings,
                                const std::string& folder, Say say);

}  // namespace longhalo

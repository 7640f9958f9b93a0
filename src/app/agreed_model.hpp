// The model of a job, the same on all ranks. Each rank reads the model's folder itself, and a copy on a
// host's own disk may be an older one: results would look like results, of a model that nobody has.
#pragma once

#include <filesystem>
#include <string>

#include "comm/mpi_session.hpp"
#include "config/config.hpp"
#include "model/model_config.hpp"

namespace longhalo {

struct AgreedModel {
  ModelConfig shape;
  std::string weights;  // weights_fingerprint(); empty where nobody had to look: one rank, or random weights
};

/// model_shape() of every rank. Throws the same JointError on all ranks where it differs, or the weights of
/// the checkpoint do, or where a tensor of it is missing or has another shape. Collective.
AgreedModel agreed_model(const MpiSession& session, const Config& config);

/// 16 hex digits of all names, types and shapes of a model's tensors and of samples of each one's bytes (all
/// of it up to 12 KiB): tells models and training steps apart in the time it takes to open the files. A bit
/// that is wrong in one copy can pass. Throws UserError.
std::string weights_fingerprint(const std::filesystem::path& model_directory);

/// Of all in a model's folder that results depend on, for records that are to be told apart: numbers, weights
/// (as above; sampled here only where `model` does not say), tokenizer and chat template. With random weights
/// of the shape alone. Throws UserError.
std::string model_fingerprint(const Config& config, const AgreedModel& model);

}  // namespace longhalo

// A model as a directory that transformers opens: config.json, model.safetensors in fp32, and the tokenizer
// of the model it was made from. What landmarks add are tensors and a key "longhalo" that transformers passes
// by.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "model/attention_pattern.hpp"
#include "model/weights.hpp"
#include "storage/safetensors_writer.hpp"

namespace longhalo {

/// Whether config.json is the origin's with what landmarks add, or written anew.
enum class OriginConfig { kKeep, kNew };

/// The arrays of a model as tensors that point into its weights. `joined` gets those that are no array of the
/// weights: landmark queries of several bands are one tensor.
std::vector<NamedTensor> model_tensors(const Weights& weights, std::vector<std::vector<float>>& joined);

/// What stands beside the weights, by name: config.json and the tokenizer's files of `origin` (a model
/// directory; may be empty). Throws UserError.
std::vector<std::pair<std::string, std::string>> model_files(const ModelConfig& config,
                                                             const AttentionPattern& pattern,
                                                             const std::filesystem::path& origin,
                                                             OriginConfig origin_config);

/// Writes `directory`, which is made; each file appears whole or not at all. The rest as model_files().
/// Throws UserError.
void save_model(const Weights& weights, const AttentionPattern& pattern,
                const std::filesystem::path& directory, const std::filesystem::path& origin,
                OriginConfig origin_config);

}  // namespace longhalo

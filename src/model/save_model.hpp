// A model as a directory that transformers opens: config.json, model.safetensors in fp32, and the tokenizer
// of the model it was made from. What landmarks add are tensors and a key "longhalo" that transformers passes
// by.
#pragma once

#include <filesystem>

#include "model/attention_pattern.hpp"
#include "model/weights.hpp"

namespace longhalo {

/// Writes `directory`, which is made; each file appears whole or not at all. `origin`: the model directory
/// whose tokenizer (and, with OriginConfig::kKeep, config.json) is taken along; may be empty. Throws
/// UserError.
enum class OriginConfig { kKeep, kNew };
void save_model(const Weights& weights, const AttentionPattern& pattern,
                const std::filesystem::path& directory, const std::filesystem::path& origin,
                OriginConfig origin_config);

}  // namespace longhalo

// The shape of a Llama-family model, read from config.json of a Hugging Face directory.
// What LongHalo does not support is refused by name, never ignored.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "kernels/rotary/rotary.hpp"

namespace longhalo {

struct ModelConfig {
  int64_t layers = 0;      // L
  int64_t hidden = 0;      // D
  int64_t ffn = 0;         // F
  int64_t heads = 0;       // H
  int64_t kv_heads = 0;    // H_kv
  int64_t head_dim = 0;    // d
  int64_t vocabulary = 0;  // V
  double rms_norm_epsilon = 1e-5;
  double rope_theta = 10000;
  std::optional<Llama3RopeScaling> rope_scaling;
  bool tied_embeddings = false;
  int64_t trained_positions = 0;  // max_position_embeddings; for a notice, and how many tokens fit fp8
  std::vector<int32_t> eos_ids;   // tokens that end a generation (generation_config.json, else config.json)

  int64_t q_size() const { return heads * head_dim; }
  int64_t kv_size() const { return kv_heads * head_dim; }
  /// Parameters of all layers, without embeddings and head.
  int64_t layer_parameters() const;
  int64_t parameters() const;
};

/// Reads config.json (and generation_config.json when it is there). Throws UserError naming file and key.
ModelConfig read_model_config(const std::filesystem::path& model_directory);

/// Throws UserError (where: `origin`) unless every size is positive, sane and fits the others.
void validate_model_config(const ModelConfig& config, const std::string& origin);

}  // namespace longhalo

// The weights of one model in host memory, fp32, ready for the CPU kernels. Replicated on every rank.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "device/host_buffer.hpp"
#include "model/model_config.hpp"

namespace longhalo {

struct LayerWeights {
  HostBuffer<float> attention_norm;  // [D]
  HostBuffer<float> q;               // [H*d, D]
  HostBuffer<float> k, v;            // [H_kv*d, D]
  HostBuffer<float> o;               // [D, H*d]
  HostBuffer<float> mlp_norm;        // [D]
  HostBuffer<float> gate_up;         // [2F, D]: gate rows, then up rows
  HostBuffer<float> down;            // [D, F]
  /// Per strided band [H_kv, d], the learned pooling query u; empty where the checkpoint has none (u = 0, a
  /// mean).
  std::vector<HostBuffer<float>> landmark_query;
  HostBuffer<float> landmark_bias;  // [H]
};

struct Weights {
  ModelConfig config;
  HostBuffer<float> embedding;  // [V, D]
  std::vector<LayerWeights> layers;
  HostBuffer<float> final_norm;   // [D]
  HostBuffer<float> untied_head;  // [V, D], empty when tied

  const float* head() const { return config.tied_embeddings ? embedding.data() : untied_head.data(); }
  int64_t bytes() const { return config.parameters() * static_cast<int64_t>(sizeof(float)); }
};

/// Added to landmark scores where neither config nor checkpoint says otherwise: at 0, untrained landmarks
/// drown the window (docs/performance.md has perplexities).
inline constexpr double kDefaultLandmarkBias = -3;

/// What the landmarks add to a checkpoint.
struct LandmarkWeights {
  int64_t strided_bands = 0;
  /// landmark_bias of every head and layer when set, else the checkpoint's own, else kDefaultLandmarkBias.
  std::optional<double> bias;
};

/// Called after each layer, with layers done and in all.
using LayerProgress = std::function<void(int64_t done, int64_t total)>;

/// Reads *.safetensors of `model_directory` (bf16, fp16 or fp32). Throws UserError naming file and tensor.
Weights load_weights(const std::filesystem::path& model_directory, const ModelConfig& config,
                     const LandmarkWeights& landmarks, const LayerProgress& progress = {});

/// Normally distributed weights of a shape, for measuring speed without a checkpoint; equal on every rank.
Weights random_weights(const ModelConfig& config, const LandmarkWeights& landmarks, uint64_t seed);

}  // namespace longhalo

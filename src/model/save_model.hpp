// A model as a directory that transformers opens: config.json, model.safetensors in the type of the weights
// (fp32 from the CPU; from a GPU matrices in bf16 and small vectors in fp32), and the tokenizer of the model
// it was made from. What landmarks add are tensors and a key "longhalo" that transformers passes by.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "device/host_buffer.hpp"
#include "model/attention_pattern.hpp"
#include "model/optimizer_layout.hpp"
#include "model/weights.hpp"
#include "storage/safetensors_writer.hpp"

namespace longhalo {

/// Whether config.json is the origin's with what landmarks add, or written anew.
enum class OriginConfig { kKeep, kNew };

/// Where a layer's arrays are, shapes as in LayerWeights. Landmark queries of several bands are one tensor,
/// so they are copied: [bands, H_kv, d], empty where there are none.
struct LayerArrays {
  const void *attention_norm, *q, *k, *v, *o, *mlp_norm, *gate, *up, *down, *landmark_bias;
  std::vector<float> landmark_query;
};

/// Where a model's arrays are, in the host's memory or a GPU's. Matrices have one type; vectors are fp32.
struct ModelArrays {
  ModelConfig config;
  Dtype matrices = Dtype::kF32;
  const void *embedding = nullptr, *final_norm = nullptr;
  const void* head = nullptr;  // nullptr when tied
  std::vector<LayerArrays> layers;
};
ModelArrays arrays_of(const Weights& weights);

/// As tensors whose bytes are where `arrays` says; it must outlive them.
std::vector<NamedTensor> model_tensors(const ModelArrays& arrays);
/// The tensor's bytes become a copy in the host's memory, which is returned.
HostBuffer<std::byte> copy_tensor(NamedTensor& tensor, const CopyBytes& copy);

/// What stands beside the weights, by name: config.json and the tokenizer's files of `origin` (a model
/// directory; may be empty). `matrices` is the type of the weights. Throws UserError.
std::vector<std::pair<std::string, std::string>> model_files(const ModelConfig& config, Dtype matrices,
                                                             const AttentionPattern& pattern,
                                                             const std::filesystem::path& origin,
                                                             OriginConfig origin_config);

/// Writes `directory`, which is made; each file appears whole or not at all. `files` stand beside the
/// tensors. Throws UserError.
void save_model(const std::vector<NamedTensor>& tensors, const HostBytes& host_bytes,
                const std::vector<std::pair<std::string, std::string>>& files,
                const std::filesystem::path& directory);

}  // namespace longhalo

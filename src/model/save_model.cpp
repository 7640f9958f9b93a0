#include "model/save_model.hpp"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/model_names.hpp"
#include "core/text.hpp"
#include "model/checkpoint_reader.hpp"
#include "storage/atomic_file.hpp"
#include "storage/safetensors_writer.hpp"

namespace longhalo {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kMostBytes = int64_t{1} << 30;  // of a tokenizer, the largest of them

Json new_config(const ModelConfig& c) {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_act", "silu"},
          {"num_hidden_layers", c.layers},
          {"hidden_size", c.hidden},
          {"intermediate_size", c.ffn},
          {"num_attention_heads", c.heads},
          {"num_key_value_heads", c.kv_heads},
          {"head_dim", c.head_dim},
          {"vocab_size", c.vocabulary},
          {"rms_norm_eps", c.rms_norm_epsilon},
          {"rope_theta", c.rope_theta},
          {"tie_word_embeddings", c.tied_embeddings},
          {"attention_bias", false},
          {"mlp_bias", false}};
}

Json bands_of(const AttentionPattern& pattern) {
  Json bands = Json::array();
  for (const Band& band : pattern.bands)
    bands.push_back({band.stride, band.near, band.far == kUnlimited ? Json("inf") : Json(band.far)});
  return bands;
}

}  // namespace

ModelArrays arrays_of(const Weights& weights) {
  const ModelConfig& c = weights.config;
  ModelArrays arrays;
  arrays.config = c;
  arrays.matrices = Dtype::kF32;
  arrays.embedding = weights.embedding.data();
  arrays.final_norm = weights.final_norm.data();
  if (!c.tied_embeddings) arrays.head = weights.untied_head.data();
  for (const LayerWeights& w : weights.layers) {
    LayerArrays& to = arrays.layers.emplace_back();
    to = {w.attention_norm.data(),
          w.q.data(),
          w.k.data(),
          w.v.data(),
          w.o.data(),
          w.mlp_norm.data(),
          w.gate_up.data(),
          w.gate_up.data() + c.ffn * c.hidden,
          w.down.data(),
          w.landmark_bias.data(),
          {}};
    for (const HostBuffer<float>& query : w.landmark_query)
      to.landmark_query.insert(to.landmark_query.end(), query.data(), query.data() + query.size());
  }
  return arrays;
}

std::vector<NamedTensor> model_tensors(const ModelArrays& arrays) {
  const ModelConfig& c = arrays.config;
  std::vector<NamedTensor> tensors;
  const auto put = [&tensors](std::string name, Dtype dtype, std::vector<int64_t> shape, const void* values) {
    int64_t bytes = dtype_bytes(dtype);
    for (const int64_t size : shape)
      bytes *= size;
    tensors.push_back({std::move(name),
                       dtype,
                       std::move(shape),
                       {static_cast<const std::byte*>(values), static_cast<size_t>(bytes)}});
  };
  put("model.embed_tokens.weight", arrays.matrices, {c.vocabulary, c.hidden}, arrays.embedding);
  for (size_t index = 0; index < arrays.layers.size(); ++index) {
    const LayerArrays& w = arrays.layers[index];
    const std::string layer = layer_prefix(static_cast<int64_t>(index));
    const auto matrix = [&](const char* name, int64_t out, int64_t in, const void* values) {
      put(layer + name, arrays.matrices, {out, in}, values);
    };
    const auto vector = [&](const char* name, std::vector<int64_t> shape, const void* values) {
      put(layer + name, Dtype::kF32, std::move(shape), values);
    };
    vector("input_layernorm.weight", {c.hidden}, w.attention_norm);
    matrix("self_attn.q_proj.weight", c.q_size(), c.hidden, w.q);
    matrix("self_attn.k_proj.weight", c.kv_size(), c.hidden, w.k);
    matrix("self_attn.v_proj.weight", c.kv_size(), c.hidden, w.v);
    matrix("self_attn.o_proj.weight", c.hidden, c.q_size(), w.o);
    vector("post_attention_layernorm.weight", {c.hidden}, w.mlp_norm);
    matrix("mlp.gate_proj.weight", c.ffn, c.hidden, w.gate);
    matrix("mlp.up_proj.weight", c.ffn, c.hidden, w.up);
    matrix("mlp.down_proj.weight", c.hidden, c.ffn, w.down);
    vector("self_attn.landmark_bias", {c.heads}, w.landmark_bias);
    const auto bands = static_cast<int64_t>(w.landmark_query.size()) / c.kv_size();
    if (bands > 0)
      vector("self_attn.landmark_query", {bands, c.kv_heads, c.head_dim}, w.landmark_query.data());
  }
  put("model.norm.weight", Dtype::kF32, {c.hidden}, arrays.final_norm);
  if (arrays.head != nullptr) put("lm_head.weight", arrays.matrices, {c.vocabulary, c.hidden}, arrays.head);
  return tensors;
}

HostBuffer<std::byte> copy_tensor(NamedTensor& tensor, const CopyBytes& copy) {
  HostBuffer<std::byte> bytes(static_cast<int64_t>(tensor.bytes.size()), "a copy of the weights");
  copy(bytes.data(), tensor.bytes.data(), bytes.size());
  tensor.bytes = bytes.span();
  return bytes;
}

std::vector<std::pair<std::string, std::string>> model_files(const ModelConfig& config, Dtype matrices,
                                                             const AttentionPattern& pattern,
                                                             const fs::path& origin,
                                                             OriginConfig origin_config) {
  const bool keeps = origin_config == OriginConfig::kKeep && !origin.empty();
  Json description =
      keeps ? Json::parse(read_json_text(origin / "config.json", kMostBytes)) : new_config(config);
  description["torch_dtype"] = matrices == Dtype::kBF16 ? "bfloat16" : "float32";
  description["longhalo"] = {{"bands", bands_of(pattern)}};
  std::vector<std::pair<std::string, std::string>> files{{"config.json", description.dump(2) + "\n"}};
  const auto take_along = [&](const char* name) {
    if (!origin.empty() && fs::exists(origin / name))
      files.emplace_back(name, read_text_file(origin / name, kMostBytes));
  };
  for (const char* name : kModelCompanions)
    take_along(name);
  if (keeps) take_along("generation_config.json");
  return files;
}

void save_model(const std::vector<NamedTensor>& tensors, const HostBytes& host_bytes,
                const std::vector<std::pair<std::string, std::string>>& beside, const fs::path& directory) {
  make_directory(directory, "the model's folder", "choose another output.directory");
  remove_abandoned_temporaries(directory, Abandoned::kWriterGone);
  // One file, whatever its size: it replaces the one before in a single rename.
  const std::vector<WeightFile> files = plan_weight_files(tensors, std::numeric_limits<int64_t>::max());
  const std::unique_ptr<VerifiedFile> file =
      write_safetensors(directory / files[0].name, tensors, files[0], host_bytes);
  file->verify();
  file->commit();
  for (const auto& [name, contents] : beside)
    write_file_atomically(directory / name, contents);
  // Another tokenizer or template that an earlier job left there would be taken for this model's.
  const auto remove_other = [&](const char* name) {
    const bool is_ours =
        std::any_of(beside.begin(), beside.end(), [&](const auto& file) { return file.first == name; });
    std::error_code ignored;
    if (!is_ours) fs::remove(directory / name, ignored);
  };
  for (const char* name : kModelCompanions)
    remove_other(name);
  for (const char* name : kModelDescriptions)
    remove_other(name);
}

}  // namespace longhalo

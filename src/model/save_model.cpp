#include "model/save_model.hpp"

#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/text.hpp"
#include "model/checkpoint_reader.hpp"
#include "storage/atomic_file.hpp"
#include "storage/safetensors_writer.hpp"

namespace longhalo {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// What belongs to a model beside its weights and config.json.
constexpr const char* kCompanions[] = {"tokenizer.json",          "tokenizer.model",  "tokenizer_config.json",
                                       "special_tokens_map.json", "vocab.json",       "merges.txt",
                                       "chat_template.jinja",     "added_tokens.json"};

std::string contents_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::string contents((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  if (!in.good() && !in.eof())
    throw UserError("the file cannot be read", file.string(), "check its permissions");
  return contents;
}

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

std::vector<NamedTensor> model_tensors(const Weights& weights, std::vector<std::vector<float>>& joined) {
  const ModelConfig& c = weights.config;
  std::vector<NamedTensor> tensors;
  const auto put = [&tensors](std::string name, std::vector<int64_t> shape, std::span<const float> values) {
    tensors.push_back({std::move(name), Dtype::kF32, std::move(shape), std::as_bytes(values)});
  };
  put("model.embed_tokens.weight", {c.vocabulary, c.hidden}, weights.embedding.span());
  for (size_t index = 0; index < weights.layers.size(); ++index) {
    const LayerWeights& w = weights.layers[index];
    const std::string layer = layer_prefix(static_cast<int64_t>(index));
    const auto add = [&](const char* name, std::vector<int64_t> shape, std::span<const float> values) {
      put(layer + name, std::move(shape), values);
    };
    const auto half = static_cast<size_t>(c.ffn * c.hidden);
    add("input_layernorm.weight", {c.hidden}, w.attention_norm.span());
    add("self_attn.q_proj.weight", {c.q_size(), c.hidden}, w.q.span());
    add("self_attn.k_proj.weight", {c.kv_size(), c.hidden}, w.k.span());
    add("self_attn.v_proj.weight", {c.kv_size(), c.hidden}, w.v.span());
    add("self_attn.o_proj.weight", {c.hidden, c.q_size()}, w.o.span());
    add("post_attention_layernorm.weight", {c.hidden}, w.mlp_norm.span());
    add("mlp.gate_proj.weight", {c.ffn, c.hidden}, w.gate_up.span().first(half));
    add("mlp.up_proj.weight", {c.ffn, c.hidden}, w.gate_up.span().last(half));
    add("mlp.down_proj.weight", {c.hidden, c.ffn}, w.down.span());
    add("self_attn.landmark_bias", {c.heads}, w.landmark_bias.span());
    if (w.landmark_query.empty()) continue;
    std::vector<float>& all = joined.emplace_back();
    for (const HostBuffer<float>& query : w.landmark_query)
      all.insert(all.end(), query.data(), query.data() + query.size());
    add("self_attn.landmark_query", {static_cast<int64_t>(w.landmark_query.size()), c.kv_heads, c.head_dim},
        all);
  }
  put("model.norm.weight", {c.hidden}, weights.final_norm.span());
  if (!c.tied_embeddings) put("lm_head.weight", {c.vocabulary, c.hidden}, weights.untied_head.span());
  return tensors;
}

std::vector<std::pair<std::string, std::string>> model_files(const ModelConfig& config,
                                                             const AttentionPattern& pattern,
                                                             const fs::path& origin,
                                                             OriginConfig origin_config) {
  const bool keeps = origin_config == OriginConfig::kKeep && !origin.empty();
  Json description = keeps ? Json::parse(contents_of(origin / "config.json")) : new_config(config);
  description["torch_dtype"] = "float32";
  description["longhalo"] = {{"bands", bands_of(pattern)}};
  std::vector<std::pair<std::string, std::string>> files{{"config.json", description.dump(2) + "\n"}};
  const auto take_along = [&](const char* name) {
    if (!origin.empty() && fs::exists(origin / name)) files.emplace_back(name, contents_of(origin / name));
  };
  for (const char* name : kCompanions)
    take_along(name);
  if (keeps) take_along("generation_config.json");
  return files;
}

void save_model(const Weights& weights, const AttentionPattern& pattern, const fs::path& directory,
                const fs::path& origin, OriginConfig origin_config) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error)
    throw UserError(text("the folder cannot be made: ", error.message()), directory.string(),
                    "choose another output.directory");
  remove_abandoned_temporaries(directory, Abandoned::kWriterGone);
  std::vector<std::vector<float>> joined;
  const std::vector<NamedTensor> tensors = model_tensors(weights, joined);
  // One file, whatever its size: it replaces the one before in a single rename.
  const std::vector<WeightFile> files = plan_weight_files(tensors, std::numeric_limits<int64_t>::max());
  const std::unique_ptr<VerifiedFile> file = write_safetensors(directory / files[0].name, tensors, files[0]);
  file->verify();
  file->commit();
  for (const auto& [name, contents] : model_files(weights.config, pattern, origin, origin_config))
    write_file_atomically(directory / name, contents);
}

}  // namespace longhalo

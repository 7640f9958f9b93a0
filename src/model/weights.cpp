#include "model/weights.hpp"

#include <cmath>
#include <random>

#include "model/checkpoint_reader.hpp"

namespace longhalo {
namespace {

LayerWeights read_layer(const CheckpointReader& reader, const ModelConfig& c,
                        const LandmarkWeights& landmarks, int64_t index) {
  const std::string layer = layer_prefix(index);
  LayerWeights w;
  w.attention_norm = reader.read(layer + "input_layernorm.weight", {c.hidden});
  w.q = reader.read(layer + "self_attn.q_proj.weight", {c.q_size(), c.hidden});
  w.k = reader.read(layer + "self_attn.k_proj.weight", {c.kv_size(), c.hidden});
  w.v = reader.read(layer + "self_attn.v_proj.weight", {c.kv_size(), c.hidden});
  w.o = reader.read(layer + "self_attn.o_proj.weight", {c.hidden, c.q_size()});
  w.mlp_norm = reader.read(layer + "post_attention_layernorm.weight", {c.hidden});
  w.gate_up = HostBuffer<float>(2 * c.ffn * c.hidden, "weights");
  const auto half = static_cast<size_t>(c.ffn * c.hidden);
  reader.read_into(layer + "mlp.gate_proj.weight", {c.ffn, c.hidden}, w.gate_up.span().first(half));
  reader.read_into(layer + "mlp.up_proj.weight", {c.ffn, c.hidden}, w.gate_up.span().last(half));
  w.down = reader.read(layer + "mlp.down_proj.weight", {c.hidden, c.ffn});

  w.landmark_query = reader.landmark_queries(index, c, landmarks.strided_bands);
  w.landmark_bias = reader.landmark_bias(index, c, landmarks.bias, kDefaultLandmarkBias);
  return w;
}

}  // namespace

Weights load_weights(const std::filesystem::path& model_directory, const ModelConfig& config,
                     const LandmarkWeights& landmarks, const LayerProgress& progress) {
  const CheckpointReader reader(model_directory);
  Weights weights;
  weights.config = config;
  weights.embedding = reader.read("model.embed_tokens.weight", {config.vocabulary, config.hidden});
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    weights.layers.push_back(read_layer(reader, config, landmarks, layer));
    if (progress) progress(layer + 1, config.layers);
  }
  weights.final_norm = reader.read("model.norm.weight", {config.hidden});
  if (!config.tied_embeddings)
    weights.untied_head = reader.read("lm_head.weight", {config.vocabulary, config.hidden});
  return weights;
}

Weights random_weights(const ModelConfig& config, const LandmarkWeights& landmarks, uint64_t seed) {
  std::mt19937_64 generator(seed);
  // Spread 1 / sqrt(inputs) keeps activations of order one through any depth; a sum of uniforms is normal
  // enough.
  const auto normal = [&generator](int64_t rows, int64_t inputs) {
    HostBuffer<float> values(rows * inputs, "weights");
    const double spread = std::sqrt(12.0 / 4.0 / static_cast<double>(inputs));
    for (float& value : values.span()) {
      const uint64_t bits = generator();
      double sum = -2;
      for (int part = 0; part < 4; ++part)
        sum += static_cast<double>(bits >> (16 * part) & 0xffff) / 65536.0;
      value = static_cast<float>(sum * spread);
    }
    return values;
  };
  const ModelConfig& c = config;
  Weights weights;
  weights.config = config;
  weights.embedding = normal(c.vocabulary, c.hidden);
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    LayerWeights& w = weights.layers.emplace_back();
    w.attention_norm = filled(c.hidden, 1);
    w.q = normal(c.q_size(), c.hidden);
    w.k = normal(c.kv_size(), c.hidden);
    w.v = normal(c.kv_size(), c.hidden);
    w.o = normal(c.hidden, c.q_size());
    w.mlp_norm = filled(c.hidden, 1);
    w.gate_up = normal(2 * c.ffn, c.hidden);
    w.down = normal(c.hidden, c.ffn);
    w.landmark_bias = filled(c.heads, landmarks.bias.value_or(kDefaultLandmarkBias));
  }
  weights.final_norm = filled(c.hidden, 1);
  if (!c.tied_embeddings) weights.untied_head = normal(c.vocabulary, c.hidden);
  return weights;
}

}  // namespace longhalo

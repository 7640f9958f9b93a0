#include "model/parameters.hpp"

#include <algorithm>

#include "core/text.hpp"

namespace longhalo {
namespace {

HostBuffer<float> zeros_of(const HostBuffer<float>& like) {
  HostBuffer<float> zeros(like.size(), "gradients");
  std::fill(zeros.data(), zeros.data() + zeros.size(), 0.0F);
  return zeros;
}

}  // namespace

std::vector<Parameter> parameters_of(Weights& weights) {
  std::vector<Parameter> all;
  const auto add = [&all](std::string name, HostBuffer<float>& values, Decay decay) {
    if (values.size() > 0) all.push_back({std::move(name), values.span(), decay});
  };
  add("lm_head.weight", weights.untied_head, Decay::kYes);
  add("model.norm.weight", weights.final_norm, Decay::kNo);
  for (size_t index = weights.layers.size(); index-- > 0;) {
    LayerWeights& w = weights.layers[index];
    const std::string layer = text("model.layers.", index, ".");
    add(layer + "mlp.down_proj.weight", w.down, Decay::kYes);
    add(layer + "mlp.gate_up_proj.weight", w.gate_up, Decay::kYes);
    add(layer + "post_attention_layernorm.weight", w.mlp_norm, Decay::kNo);
    add(layer + "self_attn.o_proj.weight", w.o, Decay::kYes);
    add(layer + "self_attn.q_proj.weight", w.q, Decay::kYes);
    add(layer + "self_attn.landmark_bias", w.landmark_bias, Decay::kNo);
    for (size_t band = 0; band < w.landmark_query.size(); ++band)
      add(text(layer, "self_attn.landmark_query.", band), w.landmark_query[band], Decay::kNo);
    add(layer + "self_attn.v_proj.weight", w.v, Decay::kYes);
    add(layer + "self_attn.k_proj.weight", w.k, Decay::kYes);
    add(layer + "input_layernorm.weight", w.attention_norm, Decay::kNo);
  }
  add("model.embed_tokens.weight", weights.embedding, Decay::kYes);
  return all;
}

int64_t elements_of(const std::vector<Parameter>& parameters) {
  int64_t elements = 0;
  for (const Parameter& parameter : parameters)
    elements += static_cast<int64_t>(parameter.values.size());
  return elements;
}

void add_landmark_queries(Weights& weights, int64_t strided_bands) {
  for (LayerWeights& layer : weights.layers) {
    while (static_cast<int64_t>(layer.landmark_query.size()) < strided_bands) {
      HostBuffer<float>& query = layer.landmark_query.emplace_back(weights.config.kv_size());
      std::fill(query.data(), query.data() + query.size(), 0.0F);
    }
  }
}

Weights zeros_like(const Weights& weights) {
  Weights zeros;
  zeros.config = weights.config;
  zeros.embedding = zeros_of(weights.embedding);
  for (const LayerWeights& from : weights.layers) {
    LayerWeights& to = zeros.layers.emplace_back();
    to.attention_norm = zeros_of(from.attention_norm);
    to.q = zeros_of(from.q);
    to.k = zeros_of(from.k);
    to.v = zeros_of(from.v);
    to.o = zeros_of(from.o);
    to.mlp_norm = zeros_of(from.mlp_norm);
    to.gate_up = zeros_of(from.gate_up);
    to.down = zeros_of(from.down);
    for (const HostBuffer<float>& query : from.landmark_query)
      to.landmark_query.push_back(zeros_of(query));
    to.landmark_bias = zeros_of(from.landmark_bias);
  }
  zeros.final_norm = zeros_of(weights.final_norm);
  zeros.untied_head = zeros_of(weights.untied_head);
  return zeros;
}

void copy_from_parameters(const std::vector<Parameter>& parameters, int64_t begin, std::span<float> flat) {
  for_each_parameter(parameters, begin, begin + static_cast<int64_t>(flat.size()),
                     [&](const Parameter& parameter, int64_t at, int64_t first, int64_t count) {
                       std::copy_n(parameter.values.data() + first, count, flat.data() + at);
                     });
}

void copy_to_parameters(const std::vector<Parameter>& parameters, int64_t begin,
                        std::span<const float> flat) {
  for_each_parameter(parameters, begin, begin + static_cast<int64_t>(flat.size()),
                     [&](const Parameter& parameter, int64_t at, int64_t first, int64_t count) {
                       std::copy_n(flat.data() + at, count, parameter.values.data() + first);
                     });
}

}  // namespace longhalo

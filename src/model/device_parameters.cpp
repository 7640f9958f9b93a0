#include "model/device_parameters.hpp"

#include <utility>

#include "core/text.hpp"

namespace longhalo {
namespace {

class Lister {
 public:
  void begin_section() { sections_.emplace_back(); }
  void matrix(std::string name, BFloat16* values, int64_t size) {
    add(std::move(name), size, Decay::kYes, values, nullptr);
  }
  void vector(std::string name, DeviceBuffer<float>& values) {
    add(std::move(name), values.size(), Decay::kNo, nullptr, values.data());
  }
  std::vector<DeviceSection> take() { return std::move(sections_); }

 private:
  void add(std::string name, int64_t size, Decay decay, BFloat16* matrix, float* vector) {
    if (size == 0) return;
    DeviceSection& section = sections_.back();
    section.parameters.push_back({std::move(name), flat_, section.size, size, decay, matrix, vector});
    section.size += (size + 7) / 8 * 8;
    flat_ += size;
  }
  std::vector<DeviceSection> sections_;
  int64_t flat_ = 0;
};

}  // namespace

std::vector<DeviceSection> sections_of(DeviceWeights& weights) {
  check(weights.precision == Precision::kBf16, "weights that learn are in bf16");
  const ModelConfig& c = weights.config;
  Lister list;
  list.begin_section();
  list.matrix("lm_head.weight", weights.untied_head.data(), weights.untied_head.size());
  list.vector("model.norm.weight", weights.final_norm);
  for (size_t index = weights.layers.size(); index-- > 0;) {
    DeviceLayerWeights& w = weights.layers[index];
    const int64_t one = c.kv_size() * c.hidden;
    const std::string layer = text("model.layers.", index, ".");
    list.begin_section();
    list.matrix(layer + "mlp.down_proj.weight", w.down.bf16.data(), w.down.bf16.size());
    list.matrix(layer + "mlp.gate_up_proj.weight", w.gate_up.bf16.data(), w.gate_up.bf16.size());
    list.vector(layer + "post_attention_layernorm.weight", w.mlp_norm);
    list.matrix(layer + "self_attn.o_proj.weight", w.o.bf16.data(), w.o.bf16.size());
    list.matrix(layer + "self_attn.q_proj.weight", w.q.bf16.data(), w.q.bf16.size());
    list.vector(layer + "self_attn.landmark_bias", w.landmark_bias);
    for (size_t band = 0; band < w.landmark_query.size(); ++band)
      list.vector(text(layer, "self_attn.landmark_query.", band), w.landmark_query[band]);
    list.matrix(layer + "self_attn.v_proj.weight", w.kv.bf16.data() + one, one);  // values
    list.matrix(layer + "self_attn.k_proj.weight", w.kv.bf16.data(), one);
    list.vector(layer + "input_layernorm.weight", w.attention_norm);
  }
  list.begin_section();
  list.matrix("model.embed_tokens.weight", weights.embedding.data(), weights.embedding.size());
  return list.take();
}

void add_landmark_queries(DeviceWeights& weights, int64_t strided_bands, cudaStream_t stream) {
  for (DeviceLayerWeights& layer : weights.layers) {
    while (static_cast<int64_t>(layer.landmark_query.size()) < strided_bands) {
      DeviceBuffer<float>& query =
          layer.landmark_query.emplace_back(weights.config.kv_size(), "landmark queries", stream);
      check_cuda(cudaMemsetAsync(query.data(), 0, static_cast<size_t>(query.bytes()), stream),
                 "landmark queries");
    }
  }
}

}  // namespace longhalo

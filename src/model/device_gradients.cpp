#include "model/device_gradients.hpp"

namespace longhalo {
namespace {

int64_t elements_of(const DeviceWeights& w) {
  const ModelConfig& c = w.config;
  int64_t elements = w.untied_head.size() + w.final_norm.size() + w.embedding.size();
  for (const DeviceLayerWeights& layer : w.layers) {
    elements += 2 * c.hidden + layer.landmark_bias.size();
    elements += (2 * c.q_size() + 2 * c.kv_size() + 3 * c.ffn) * c.hidden;
    for (const DeviceBuffer<float>& query : layer.landmark_query)
      elements += query.size();
  }
  return elements;
}

}  // namespace

DeviceGradients::DeviceGradients(const DeviceWeights& like, cudaStream_t stream)
    : all_(elements_of(like), "gradients of all weights", stream) {
  check(like.precision == Precision::kBf16, "weights that learn are in bf16");
  const ModelConfig& c = like.config;
  float* at = all_.data();
  const auto take = [&at](int64_t elements) { return std::exchange(at, at + elements); };
  head_ = take(like.untied_head.size());
  final_norm_ = take(c.hidden);
  after_loss_ = at - all_.data();
  layers_.resize(like.layers.size());
  after_layer_.resize(like.layers.size());
  for (size_t index = like.layers.size(); index-- > 0;) {
    DeviceLayerGradients& g = layers_[index];
    g.down = take(c.hidden * c.ffn);
    g.gate_up = take(2 * c.ffn * c.hidden);
    g.mlp_norm = take(c.hidden);
    g.o = take(c.hidden * c.q_size());
    g.q = take(c.q_size() * c.hidden);
    g.landmark_bias = take(like.layers[index].landmark_bias.size());
    for (const DeviceBuffer<float>& query : like.layers[index].landmark_query)
      g.landmark_query.push_back(take(query.size()));
    g.v = take(c.kv_size() * c.hidden);
    g.k = take(c.kv_size() * c.hidden);
    g.attention_norm = take(c.hidden);
    after_layer_[index] = at - all_.data();
  }
  embedding_ = take(like.embedding.size());
  if (c.tied_embeddings) head_ = embedding_;
  check(at == all_.data() + all_.size(), "every weight has a gradient");
}

void DeviceGradients::clear(cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(all_.data(), 0, static_cast<size_t>(all_.bytes()), stream),
             "clearing gradients");
}

}  // namespace longhalo

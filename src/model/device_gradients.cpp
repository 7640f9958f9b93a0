#include "model/device_gradients.hpp"

#include <algorithm>

namespace longhalo {

DeviceGradients::DeviceGradients(DeviceWeights& like, int64_t layers_at_once, cudaStream_t stream)
    : sections_(sections_of(like)) {
  check(layers_at_once >= 1, "at least one layer's gradients have memory");
  const ModelConfig& c = like.config;
  const size_t last = sections_.size() - 1;
  const auto slots = static_cast<size_t>(std::min(layers_at_once, c.layers));
  int64_t a_layer = 0;
  for (size_t s = 1; s < last; ++s)
    a_layer = std::max(a_layer, sections_[s].size);
  all_ = DeviceBuffer<float>(sections_[0].size + sections_[last].size + static_cast<int64_t>(slots) * a_layer,
                             "gradients of weights", stream);
  places_.push_back(all_.data());
  float* const first_layer = all_.data() + sections_[0].size;
  for (size_t s = 1; s < last; ++s)
    places_.push_back(first_layer + static_cast<int64_t>((s - 1) % slots) * a_layer);
  places_.push_back(first_layer + static_cast<int64_t>(slots) * a_layer);

  for (int64_t index = 0; index < c.layers; ++index) {
    const auto s = static_cast<size_t>(section_of_layer(c, index));
    const std::vector<DeviceParameter>& parameters = sections_[s].parameters;
    size_t next = 0;
    const auto take = [&] { return places_[s] + parameters[next++].at; };
    DeviceLayerGradients& g = layers_.emplace_back();
    g.down = take(), g.gate_up = take(), g.mlp_norm = take(), g.o = take(), g.q = take();
    g.landmark_bias = take();
    for (size_t band = 0; band < like.layers[static_cast<size_t>(index)].landmark_query.size(); ++band)
      g.landmark_query.push_back(take());
    g.v = take(), g.k = take(), g.attention_norm = take();
    check(next == parameters.size(), "every weight of a layer has a gradient");
  }
  embedding_ = places_[last];
  head_ = c.tied_embeddings ? embedding_ : places_[0];
  final_norm_ = places_[0] + sections_[0].parameters.back().at;
}

void DeviceGradients::clear_section(int64_t index, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(section(index), 0,
                             static_cast<size_t>(sections_[static_cast<size_t>(index)].size) * sizeof(float),
                             stream),
             "clearing gradients");
}

void DeviceGradients::clear(cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(all_.data(), 0, static_cast<size_t>(all_.bytes()), stream),
             "clearing gradients");
}

std::vector<float> DeviceGradients::to_host(cudaStream_t stream) {
  std::vector<float> flat;
  for (size_t s = 0; s < sections_.size(); ++s) {
    std::vector<float> values(static_cast<size_t>(sections_[s].size));
    longhalo::to_host<float>(values, places_[s], stream);
    for (const DeviceParameter& parameter : sections_[s].parameters) {
      check(parameter.flat == static_cast<int64_t>(flat.size()), "sections follow each other");
      flat.insert(flat.end(), values.begin() + parameter.at, values.begin() + parameter.at + parameter.size);
    }
  }
  return flat;
}

}  // namespace longhalo

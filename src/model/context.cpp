#include "model/context.hpp"

#include <algorithm>

namespace longhalo {

void KeyRows::reset(int64_t first, int64_t count) {
  if (count * row_elements_ > k_.size()) {
    k_ = HostBuffer<float>(count * row_elements_, "keys");
    v_ = HostBuffer<float>(count * row_elements_, "values");
  }
  first_ = first;
  count_ = count;
}

void KeyRows::append(int64_t rows, int64_t keep) {
  if ((count_ + rows) * row_elements_ > k_.size()) {
    // Full: the oldest rows go and the kept ones move to the front. A quarter of slack makes that rare.
    const int64_t kept = std::min(keep, count_);
    const int64_t from = (count_ - kept) * row_elements_;
    const int64_t room = (kept + rows + std::max<int64_t>(kept / 4, 64)) * row_elements_;
    for (HostBuffer<float>* buffer : {&k_, &v_}) {
      HostBuffer<float> larger;
      if (room > buffer->size()) larger = HostBuffer<float>(room, "keys and values of the context");
      float* target = room > buffer->size() ? larger.data() : buffer->data();
      std::copy_n(buffer->data() + from, kept * row_elements_, target);
      if (room > buffer->size()) *buffer = std::move(larger);
    }
    first_ += count_ - kept;
    count_ = kept;
  }
  count_ += rows;
}

KeyRows KeyRows::clone() const {
  KeyRows copy(row_elements_);
  copy.reset(first_, count_);
  std::copy_n(k_.data(), count_ * row_elements_, copy.k_.data());
  std::copy_n(v_.data(), count_ * row_elements_, copy.v_.data());
  return copy;
}

Context::Context(const ModelConfig& config, const AttentionPattern& pattern) {
  const size_t strided = pattern.strides().size();
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    LayerContext& empty = layers_.emplace_back();
    empty.exact = KeyRows(config.kv_size());
    for (size_t band = 0; band < strided; ++band) {
      empty.landmarks.emplace_back(config.kv_size());
      empty.open.emplace_back(config.kv_heads, config.head_dim);
    }
  }
}

Context Context::clone() const {
  Context copy;
  copy.position_ = position_;
  for (const LayerContext& layer : layers_) {
    LayerContext& twin = copy.layers_.emplace_back();
    twin.exact = layer.exact.clone();
    for (const KeyRows& landmarks : layer.landmarks)
      twin.landmarks.push_back(landmarks.clone());
    twin.open = layer.open;
  }
  return copy;
}

int64_t Context::bytes() const {
  int64_t total = 0;
  for (const LayerContext& layer : layers_) {
    total += layer.exact.bytes();
    for (const KeyRows& landmarks : layer.landmarks)
      total += landmarks.bytes();
    for (const LandmarkPoolState& open : layer.open)
      total += static_cast<int64_t>((open.m.size() + open.l.size() + open.k_sum.size() + open.v_sum.size()) *
                                    sizeof(float));
  }
  return total;
}

std::vector<BandKeys<float>> band_keys(const AttentionPattern& pattern, const BandKeys<float>& exact,
                                       const std::vector<KeyRows>& landmarks) {
  std::vector<BandKeys<float>> bands;
  size_t strided = 0;
  for (const Band& band : pattern.bands) {
    if (band.stride == 1) {
      bands.push_back(exact);
      bands.back().band = band;
    } else {
      bands.push_back(landmarks[strided++].as_band(band));
    }
  }
  return bands;
}

}  // namespace longhalo

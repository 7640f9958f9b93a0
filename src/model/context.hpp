// What remains of a sequence once it was read, and all that later tokens need of it: for each layer the last
// exact keys and values, every landmark, and the pooling state of the open segment. It does not grow with the
// sequence like a KV cache does, except for one landmark every S tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "device/host_buffer.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"
#include "model/attention_pattern.hpp"
#include "model/model_config.hpp"

namespace longhalo {

/// Keys and values [rows, H_kv, d] that grow at the end and may be dropped at the front. Row 0 is global key
/// first().
class KeyRows {
 public:
  KeyRows() = default;
  explicit KeyRows(int64_t row_elements) : row_elements_(row_elements) {}

  int64_t first() const { return first_; }
  int64_t end() const { return first_ + count_; }
  const float* k() const { return k_.data(); }
  const float* v() const { return v_.data(); }
  float* k_row(int64_t key) { return k_.data() + (key - first_) * row_elements_; }
  float* v_row(int64_t key) { return v_.data() + (key - first_) * row_elements_; }

  /// Makes the rows start at global key `first` and hold `count` rows, contents undefined.
  void reset(int64_t first, int64_t count);
  /// Adds `rows` undefined rows at the end; of the rows there were, at least the last `keep` stay.
  void append(int64_t rows, int64_t keep);
  BandKeys<float> as_band(const Band& band) const { return {band, k_.data(), v_.data(), first_, count_}; }
  KeyRows clone() const;
  int64_t bytes() const { return 2 * count_ * row_elements_ * static_cast<int64_t>(sizeof(float)); }

 private:
  int64_t row_elements_ = 0;
  int64_t first_ = 0, count_ = 0;
  HostBuffer<float> k_, v_;
};

struct LayerContext {
  KeyRows exact;                        // rotated keys of the last tokens
  std::vector<KeyRows> landmarks;       // per strided band
  std::vector<LandmarkPoolState> open;  // per strided band
};

class Context {
 public:
  /// The context of an empty sequence.
  Context(const ModelConfig& config, const AttentionPattern& pattern);

  /// An independent copy: every query on a document continues from its own.
  Context clone() const;

  int64_t position() const { return position_; }  // tokens read so far
  void advance(int64_t tokens) { position_ += tokens; }
  LayerContext& layer(int64_t index) { return layers_[static_cast<size_t>(index)]; }
  /// Bytes of keys, values and pooling state that are kept.
  int64_t bytes() const;

 private:
  Context() = default;
  int64_t position_ = 0;
  std::vector<LayerContext> layers_;
};

/// The bands of `pattern` as the attention kernel takes them, over the rows of one layer.
std::vector<BandKeys<float>> band_keys(const AttentionPattern& pattern, const BandKeys<float>& exact,
                                       const std::vector<KeyRows>& landmarks);

}  // namespace longhalo

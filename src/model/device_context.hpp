// What remains of a sequence once it was read (context.hpp), in the memory of the GPU. A row is [2, H_kv, d]
// in bf16, keys then values, as in a prefill, so that rows arrive in place.
//
// All layers hold the same rows, so one description of them serves all. What lies beyond the end is zero: a
// kernel whose graph was captured earlier may read it, but does not use it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/device_buffer.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/landmark_pool/rotate_and_pool.hpp"
#include "model/attention_pattern.hpp"
#include "model/model_config.hpp"

namespace longhalo {

/// Rows of one kind (exact keys, or the landmarks of one band) of every layer; row 0 is global key first().
class DeviceKeyRows {
 public:
  DeviceKeyRows(int64_t layers, int64_t row_elements) : row_elements_(row_elements), layers_(layers) {}

  int64_t first() const { return first_; }
  int64_t end() const { return first_ + count_; }
  int64_t capacity() const { return capacity_; }
  BFloat16* rows(int64_t layer) { return buffers_[static_cast<size_t>(layer)].data(); }
  const BFloat16* rows(int64_t layer) const { return buffers_[static_cast<size_t>(layer)].data(); }

  /// Makes the rows start at global key `first` and hold `count` rows, contents undefined, with slack after.
  void reset(int64_t first, int64_t count, cudaStream_t stream);
  /// Adds `rows` rows at the end; of the rows there were, at least the last `keep` stay. Returns whether
  /// memory moved.
  bool append(int64_t rows, int64_t keep, cudaStream_t stream);
  DeviceKeyRows clone(cudaStream_t stream) const;
  /// As the attention kernel takes them, the first `count` of them.
  BandKeys<BFloat16> as_band(const Band& band, int64_t layer, int64_t count) const;
  int64_t bytes() const { return layers_ * count_ * row_elements_ * static_cast<int64_t>(sizeof(BFloat16)); }
  /// Bytes that reset() allocates.
  static int64_t allocated_bytes(int64_t layers, int64_t row_elements, int64_t count);

 private:
  DeviceBuffer<BFloat16> made(int64_t capacity, const BFloat16* from, int64_t rows,
                              cudaStream_t stream) const;

  int64_t row_elements_ = 0, layers_ = 0;
  int64_t first_ = 0, count_ = 0, capacity_ = 0;
  std::vector<DeviceBuffer<BFloat16>> buffers_;  // by layer, [capacity, row_elements]
};

class DeviceContext {
 public:
  /// The context of an empty sequence.
  DeviceContext(const ModelConfig& config, const AttentionPattern& pattern, cudaStream_t stream);

  /// An independent copy: every query on a document continues from its own.
  DeviceContext clone(cudaStream_t stream) const;

  int64_t position() const { return position_; }  // tokens read so far
  void advance(int64_t tokens) { position_ += tokens; }
  int64_t layers() const { return layers_; }
  int64_t bands() const { return static_cast<int64_t>(landmarks_.size()); }  // strided ones
  DeviceKeyRows& exact() { return exact_; }
  DeviceKeyRows& landmarks(int64_t band) { return landmarks_[static_cast<size_t>(band)]; }
  const DeviceKeyRows& exact() const { return exact_; }
  const DeviceKeyRows& landmarks(int64_t band) const { return landmarks_[static_cast<size_t>(band)]; }
  /// Pooling state of the open segment, of all layers and bands in one array and of one of them.
  DeviceBuffer<float>& open_states() { return open_; }
  float* open(int64_t layer, int64_t band) { return open_.data() + (layer * bands() + band) * state_floats_; }
  /// Bytes of keys, values and pooling state that are kept.
  int64_t bytes() const;

 private:
  DeviceContext(int64_t layers, int64_t row_elements) : layers_(layers), exact_(layers, row_elements) {}

  int64_t position_ = 0;
  int64_t layers_ = 0;
  int64_t state_floats_ = 0;
  DeviceKeyRows exact_;                   // rotated keys of the last tokens
  std::vector<DeviceKeyRows> landmarks_;  // per strided band
  DeviceBuffer<float> open_;              // [L, bands, pool_state_floats]
};

/// The bands of `pattern` as the attention kernel takes them, over the rows of one layer.
std::vector<BandKeys<BFloat16>> band_keys(const AttentionPattern& pattern, const BandKeys<BFloat16>& exact,
                                          std::span<const BandKeys<BFloat16>> landmarks);

/// Rows [2, H_kv, d] from `rows` on as keys of `band`.
BandKeys<BFloat16> rows_as_band(const Band& band, const BFloat16* rows, int64_t row_elements, int64_t first,
                                int64_t count);

}  // namespace longhalo

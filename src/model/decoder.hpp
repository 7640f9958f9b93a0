// Reads tokens into a context on ONE rank: the prompt after a prefilled document, then token by token.
// A portion of any size gives the same result as the same tokens one at a time.
#pragma once

#include <cstdint>
#include <span>

#include "model/attention_pattern.hpp"
#include "model/context.hpp"
#include "model/layer.hpp"

namespace longhalo {

class Decoder {
 public:
  /// Tokens are taken in tiles of at most `tile`. `weights` must outlive the decoder.
  Decoder(const Weights& weights, const AttentionPattern& pattern, int64_t tile);

  /// Appends `tokens` (at least one) to `context`. Returns the logits [V] after the last one, valid until the
  /// next call.
  std::span<const float> extend(Context& context, std::span<const int32_t> tokens);

 private:
  void extend_tile(Context& context, std::span<const int32_t> tokens);
  void extend_layer(Context& context, int64_t layer, int64_t n);

  const Weights& weights_;
  AttentionPattern pattern_;
  std::vector<int64_t> strides_;
  Layer layer_;
  HostBuffer<float> x_;       // [tile, D]
  HostBuffer<float> hidden_;  // [D]
  HostBuffer<float> logits_;  // [V]
};

}  // namespace longhalo

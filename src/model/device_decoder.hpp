// Reads tokens into a context on ONE GPU (decoder.hpp): the prompt after a prefilled document in tiles, then
// token by token. A step of one token is the same few hundred launches every time, so it is captured into a
// graph once and replayed; position and token travel in memory that the graph reads. It is captured anew when
// the context's memory moves.
#pragma once

#include <cstdint>
#include <span>

#include "device/graph.hpp"
#include "device/pinned_buffer.hpp"
#include "model/attention_pattern.hpp"
#include "model/device_context.hpp"
#include "model/device_layer.hpp"

namespace longhalo {

enum class UseGraphs { kNo, kYes };

/// A context that is being extended, with the graph over its memory.
struct DecodedContext {
  explicit DecodedContext(DeviceContext start) : context(std::move(start)) {}
  DeviceContext context;
  Graph graph;  // after the context: it is released first
};

class DeviceDecoder {
 public:
  /// Tokens are taken in tiles of at most `tile`. `weights` and `matmul` must outlive the decoder.
  DeviceDecoder(const DeviceWeights& weights, const AttentionPattern& pattern, int64_t tile,
                DeviceMatmul& matmul, cudaStream_t stream, UseGraphs use_graphs = UseGraphs::kYes);

  /// Queues `tokens` (at least one, inside the vocabulary) at the end of the context; the host does not wait
  /// for the last of them.
  void extend(DecodedContext& state, std::span<const int32_t> tokens);

  /// After the last token that extend() was given: the most likely next one, and all logits [V] (valid until
  /// the next call). The host waits.
  int32_t most_likely();
  std::span<const float> logits();

  static int64_t bytes(const ModelConfig& config, Precision precision, int64_t tile);

 private:
  void extend_tile(DecodedContext& state, std::span<const int32_t> tokens);
  bool make_room(DeviceContext& context, int64_t n);
  void queue_tile(DeviceContext& context, int64_t n);
  void queue_layer(DeviceContext& context, int64_t layer, int64_t n);

  const DeviceWeights& weights_;
  AttentionPattern pattern_;
  std::vector<int64_t> strides_;
  cudaStream_t stream_;
  UseGraphs use_graphs_;
  bool step_is_warm_ = false;  // products of one token have their plans
  DeviceLayer layer_;
  DeviceBuffer<BFloat16> x_;       // [tile, D]
  DeviceBuffer<BFloat16> new_kv_;  // [tile, 2, H_kv, d]
  DeviceBuffer<float> logits_;     // [V]
  DeviceBuffer<int64_t> position_;
  DeviceBuffer<int32_t> tokens_;  // [tile]
  DeviceBuffer<int32_t> most_likely_;
  PinnedBuffer<int64_t> host_position_;
  PinnedBuffer<int32_t> host_tokens_;
  PinnedBuffer<int32_t> host_most_likely_;
  PinnedBuffer<float> host_logits_;
  Event queued_;  // the last tile: before it is done, the host must not write what it reads
};

}  // namespace longhalo

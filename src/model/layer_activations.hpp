// What the backward pass needs of a layer's forward, beside its input and its keys: queries, attention's
// output and normalisers, the stream between attention and MLP, and the MLP's gate and up. A tile of it is
// made again from the layer's input, or that of the whole shard is kept from the forward pass (checkpointing
// off). Norms and the activated MLP are not in it: to make them again costs no more than to read them.
#pragma once

#include <cstdint>

#include "device/host_buffer.hpp"
#include "model/model_config.hpp"

namespace longhalo {

/// Of some consecutive tokens; n of them are one tile.
struct LayerValues {
  float* q = nullptr;         // [n, H*d], rotated
  float* attended = nullptr;  // [n, H*d]
  float* lse = nullptr;       // [H, n]
  float* x_mid = nullptr;     // [n, D]: after attention
  float* gate_up = nullptr;   // [n, 2F]
};

class LayerActivations {
 public:
  LayerActivations(const ModelConfig& config, int64_t tokens)
      : q_size_(config.q_size()),
        heads_(config.heads),
        hidden_(config.hidden),
        ffn_(config.ffn),
        q_(tokens * q_size_, "queries of a layer"),
        attended_(tokens * q_size_, "attention output of a layer"),
        lse_(tokens * heads_, "softmax normalisers of a layer"),
        x_mid_(tokens * hidden_, "activations between attention and MLP of a layer"),
        gate_up_(tokens * 2 * ffn_, "gate and up activations of a layer") {}

  /// Of the tile that begins at token `first`. Tiles must begin where they began when they were filled: each
  /// tile's normalisers lie together.
  LayerValues at(int64_t first) {
    return {q_.data() + first * q_size_, attended_.data() + first * q_size_, lse_.data() + first * heads_,
            x_mid_.data() + first * hidden_, gate_up_.data() + first * 2 * ffn_};
  }

  static int64_t bytes(const ModelConfig& config, int64_t tokens) {
    return tokens * (2 * config.q_size() + config.heads + config.hidden + 2 * config.ffn) *
           static_cast<int64_t>(sizeof(float));
  }

 private:
  int64_t q_size_, heads_, hidden_, ffn_;
  HostBuffer<float> q_, attended_, lse_, x_mid_, gate_up_;
};

}  // namespace longhalo

// The backward pass of one transformer layer on the GPU as a list of kernel calls over a tile of tokens
// (layer_backward.hpp is its CPU form), all on ONE stream; the host waits for nothing. What forward computed
// inside the layer is made again from the layer's input, bit for bit as DeviceLayer made it.
//
//   attend   forward again down to gate and up, then back: gradients of MLP, output projection and Q; dk and
//            dv of every visible key are added up
//   keys     after dk and dv are whole and were turned and pooled back: K and V projection, and the norm
//            before Q, K and V
//
// Activations and their gradients are bf16, sums and the gradients of weights and of keys fp32.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/attention/attention_backward.hpp"
#include "kernels/matmul/device_matmul.hpp"
#include "model/device_gradients.hpp"

namespace longhalo {

class DeviceLayerBackward {
 public:
  /// Works on up to `tile` tokens at once. All arguments must outlive it; `matmul` queues on `stream`.
  /// Gradients are added to `gradients`.
  DeviceLayerBackward(const DeviceWeights& weights, DeviceGradients& gradients, int64_t tile,
                      DeviceMatmul& matmul, cudaStream_t stream);

  int64_t tile() const { return tile_; }
  const double* frequencies() const { return frequencies_.data(); }

  /// A tile of a layer: n tokens (n <= tile) from position `first_position`, of documents that begin at
  /// `doc_start` [n], with the layer's input x [n, D] and the keys that they see. Device memory.
  struct Tile {
    int64_t layer = 0;
    int64_t n = 0;
    int64_t first_position = 0;
    const int64_t* doc_start = nullptr;
    std::span<const BandKeys<BFloat16>> bands;  // as DeviceLayer got them
    /// The same with fewer keys that nobody here sees, for the gradient to look at.
    std::span<const BandKeys<BFloat16>> seen_bands;
    const BFloat16* x = nullptr;
  };

  /// d_x [n, D]: the gradient of the layer's output, becomes that of x through the residual stream, MLP and
  /// output projection. d_normed [n, D] receives the gradient of the normed input through Q. `key_gradients`
  /// belong to the tile's seen_bands and are added to.
  void attend(const Tile& tile, std::span<const BandGradient<BFloat16>> key_gradients, BFloat16* d_x,
              BFloat16* d_normed);

  /// x, d_x, d_normed as attend() left them; d_kv [n, 2, H_kv, d] (keys' before the rotary embedding). Adds
  /// the last terms of d_x; d_normed is used up. n <= tile.
  void keys(int64_t layer, int64_t n, const BFloat16* x, const BFloat16* d_kv, BFloat16* d_normed,
            BFloat16* d_x);

  /// The gradient of rmsnorm: dx and d_weight are added into.
  void norm_backward(int64_t n, const BFloat16* x, const DeviceBuffer<float>& weight, const BFloat16* d_out,
                     BFloat16* dx, float* d_weight);

  /// Whether attention's gradient has the same bits on every repeat (AttentionGradient); it has by default.
  void set_deterministic(bool deterministic) { deterministic_ = deterministic; }

  /// Bytes of the temporaries of a tile, without attention's workspace.
  static int64_t bytes(const ModelConfig& config, int64_t tile);

 private:
  void forward(const Tile& tile);
  Attention<BFloat16> attention_of(const Tile& tile);
  const DeviceLayerWeights& layer(int64_t index) const { return weights_.layers[static_cast<size_t>(index)]; }

  const DeviceWeights& weights_;
  DeviceGradients& gradients_;
  int64_t tile_;
  bool deterministic_ = true;
  DeviceMatmul& matmul_;
  cudaStream_t stream_;
  DeviceBuffer<double> frequencies_;                    // [d/2]
  DeviceBuffer<BFloat16> normed_, x_mid_, mlp_normed_;  // [tile, D]
  DeviceBuffer<BFloat16> q_, attended_;                 // [tile, H*d]
  DeviceBuffer<float> lse_;                             // [H, tile]
  DeviceBuffer<BFloat16> gate_up_;                      // [tile, 2F], then its gradient
  DeviceBuffer<BFloat16> activated_, d_activated_;      // [tile, F]
  DeviceBuffer<BFloat16> d_mlp_normed_;                 // [tile, D]
  DeviceBuffer<BFloat16> d_attended_, d_q_;             // [tile, H*d]
  DeviceBuffer<uint8_t> norm_workspace_, attention_workspace_;
};

}  // namespace longhalo

// The backward pass of one transformer layer as a list of kernel calls over a tile of tokens. What forward
// computed inside the layer is given (LayerValues) or computed again from nothing but the layer's input.
//
//   forward  norm -> Q -> rotary -> attention -> x_mid -> norm -> gate and up: what Layer::attend() computes,
//            bit for bit, and leaves what backward needs
//   attend   back through all of it: gradients of MLP, output projection and Q; dk and dv of every visible
//   key
//            are added up
//   keys     after dk and dv are whole: K and V projection, and the norm before Q, K and V
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/host_buffer.hpp"
#include "kernels/attention/attention_backward.hpp"
#include "model/layer_activations.hpp"
#include "model/weights.hpp"

namespace longhalo {

class LayerBackward {
 public:
  /// Works on up to `tile` tokens at once; O(tile * (D + F)) memory. `weights` must outlive it. Gradients are
  /// added to `gradients`, shaped like `weights`.
  LayerBackward(const Weights& weights, Weights& gradients, int64_t tile);

  int64_t tile() const { return tile_; }

  /// A tile of a layer: n tokens (n <= tile) from position `first_position`, of documents that begin at
  /// `doc_start` [n], with the layer's input x [n, D] and the keys that they see.
  struct Tile {
    int64_t layer = 0;
    int64_t n = 0;
    int64_t first_position = 0;
    const int64_t* doc_start = nullptr;
    std::span<const BandKeys<float>> bands;
    const float* x = nullptr;
  };

  /// Fills `values`, and `x_out` [n, D] with the layer's output unless it is nullptr.
  void forward(const Tile& tile, const LayerValues& values, float* x_out);

  /// d_x [n, D]: the gradient of the layer's output, becomes that of x through the residual stream, MLP and
  /// output projection. d_normed [n, D] receives the gradient of the normed input through Q. `key_gradients`
  /// belong to the tile's bands and are added to.
  void attend(const Tile& tile, const LayerValues& values, std::span<const BandGradient<float>> key_gradients,
              float* d_x, float* d_normed);
  /// The same from values that are made again.
  void attend(const Tile& tile, std::span<const BandGradient<float>> key_gradients, float* d_x,
              float* d_normed);

  /// x, d_x, d_normed as attend() left them; dk (before the rotary embedding), dv [n, H_kv, d]. Adds the last
  /// terms of d_x; d_normed is used up. n <= tile.
  void keys(int64_t layer, int64_t n, const float* x, const float* dk, const float* dv, float* d_normed,
            float* d_x);

  /// k [n, H_kv, d], at positions first_position + i * step, or its gradient: turned back in place.
  void rotate_back(int64_t n, double first_position, double step, float* k) const;

 private:
  Attention<float> attention_of(const Tile& tile, const LayerValues& values) const;
  const LayerWeights& layer(int64_t index) const { return weights_.layers[static_cast<size_t>(index)]; }

  const Weights& weights_;
  Weights& gradients_;
  int64_t tile_;
  std::vector<double> frequencies_;
  LayerActivations again_;                     // of a tile
  HostBuffer<float> normed_, mlp_normed_;      // [tile, D]
  HostBuffer<float> activated_;                // [tile, F]
  HostBuffer<float> d_gate_up_, d_activated_;  // [tile, 2F], [tile, F]
  HostBuffer<float> d_mlp_normed_;             // [tile, D]
  HostBuffer<float> d_attended_, d_q_;         // [tile, H*d]
};

}  // namespace longhalo

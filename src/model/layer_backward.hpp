// The backward pass of one transformer layer as a list of kernel calls over a tile of tokens, from nothing
// but the layer's input: what forward computed inside the layer is computed again, tile by tile.
//
//   attend   norm -> Q -> rotary -> attention -> x_mid -> norm -> SwiGLU (again), then back through all of
//   it:
//            gradients of MLP, output projection and Q; dk and dv of every visible key are added up
//   keys     after dk and dv are whole: K and V projection, and the norm before Q, K and V
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/host_buffer.hpp"
#include "kernels/attention/attention_backward.hpp"
#include "model/weights.hpp"

namespace longhalo {

class LayerBackward {
 public:
  /// Works on up to `tile` tokens at once; O(tile * (D + F)) memory. `weights` must outlive it. Gradients are
  /// added to `gradients`, shaped like `weights`.
  LayerBackward(const Weights& weights, Weights& gradients, int64_t tile);

  int64_t tile() const { return tile_; }

  /// x [n, D]: the layer's input. d_x [n, D]: the gradient of its output, becomes that of x through the
  /// residual stream, MLP and output projection. d_normed [n, D] receives the gradient of the normed input
  /// through Q. `key_gradients` belong to `bands` and are added to. n <= tile.
  void attend(int64_t layer, int64_t n, int64_t first_position, const int64_t* doc_start,
              std::span<const BandKeys<float>> bands, std::span<const BandGradient<float>> key_gradients,
              const float* x, float* d_x, float* d_normed);

  /// x, d_x, d_normed as attend() left them; dk (before the rotary embedding), dv [n, H_kv, d]. Adds the last
  /// terms of d_x; d_normed is used up. n <= tile.
  void keys(int64_t layer, int64_t n, const float* x, const float* dk, const float* dv, float* d_normed,
            float* d_x);

  /// k [n, H_kv, d], at positions first_position + i * step, or its gradient: turned back in place.
  void rotate_back(int64_t n, double first_position, double step, float* k) const;

 private:
  const LayerWeights& layer(int64_t index) const { return weights_.layers[static_cast<size_t>(index)]; }

  const Weights& weights_;
  Weights& gradients_;
  int64_t tile_;
  std::vector<double> frequencies_;
  HostBuffer<float> normed_, x_mid_, mlp_normed_;  // [tile, D]
  HostBuffer<float> q_, attended_;                 // [tile, H*d]
  HostBuffer<float> lse_;                          // [H, tile]
  HostBuffer<float> gate_up_, activated_;          // [tile, 2F], [tile, F]
  HostBuffer<float> d_gate_up_, d_activated_;      // [tile, 2F], [tile, F]
  HostBuffer<float> d_mlp_normed_;                 // [tile, D]
  HostBuffer<float> d_attended_, d_q_;             // [tile, H*d]
};

}  // namespace longhalo

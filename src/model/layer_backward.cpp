#include "model/layer_backward.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/matmul/matmul.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/rotary/rotary.hpp"
#include "kernels/swiglu/swiglu.hpp"

namespace longhalo {

LayerBackward::LayerBackward(const Weights& weights, Weights& gradients, int64_t tile)
    : weights_(weights),
      gradients_(gradients),
      tile_(tile),
      frequencies_(rotary_frequencies(weights.config.head_dim, weights.config.rope_theta,
                                      weights.config.rope_scaling ? &*weights.config.rope_scaling : nullptr)),
      again_(weights.config, tile),
      normed_(tile * weights.config.hidden, "normed activations of a tile"),
      mlp_normed_(tile * weights.config.hidden, "normed activations of a tile"),
      activated_(tile * weights.config.ffn, "MLP activations of a tile"),
      d_gate_up_(tile * 2 * weights.config.ffn, "gradients of gate and up of a tile"),
      d_activated_(tile * weights.config.ffn, "gradients of MLP activations of a tile"),
      d_mlp_normed_(tile * weights.config.hidden, "gradients of normed activations of a tile"),
      d_attended_(tile * weights.config.q_size(), "gradients of the attention output of a tile"),
      d_q_(tile * weights.config.q_size(), "gradients of queries of a tile") {
  check(tile >= 1, "a tile has at least one token");
}

Attention<float> LayerBackward::attention_of(const Tile& tile, const LayerValues& values) const {
  const ModelConfig& c = weights_.config;
  Attention<float> attention;
  attention.heads = c.heads;
  attention.kv_heads = c.kv_heads;
  attention.head_dim = c.head_dim;
  attention.scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
  attention.queries = tile.n;
  attention.first_query = tile.first_position;
  attention.q = values.q;
  attention.bands = tile.bands;
  attention.landmark_bias = layer(tile.layer).landmark_bias.data();
  attention.doc_start = tile.doc_start;
  attention.out = values.attended;
  attention.lse = values.lse;
  return attention;
}

void LayerBackward::forward(const Tile& tile, const LayerValues& values, float* x_out) {
  check(tile.n <= tile_, "a tile holds the tokens given to it");
  const ModelConfig& c = weights_.config;
  const LayerWeights& w = layer(tile.layer);
  const auto epsilon = static_cast<float>(c.rms_norm_epsilon);
  const int64_t n = tile.n;
  rmsnorm(n, c.hidden, tile.x, w.attention_norm.data(), epsilon, normed_.data());
  matmul(n, c.q_size(), c.hidden, normed_.data(), w.q.data(), values.q);
  rotary(n, c.heads, c.head_dim, frequencies_, static_cast<double>(tile.first_position), 1, values.q);
  attention_forward(attention_of(tile, values));
  std::copy_n(tile.x, n * c.hidden, values.x_mid);
  matmul(n, c.hidden, c.q_size(), values.attended, w.o.data(), values.x_mid, Accumulate::kAdd);
  rmsnorm(n, c.hidden, values.x_mid, w.mlp_norm.data(), epsilon, mlp_normed_.data());
  matmul(n, 2 * c.ffn, c.hidden, mlp_normed_.data(), w.gate_up.data(), values.gate_up);
  if (x_out == nullptr) return;
  swiglu(n, c.ffn, values.gate_up, activated_.data());
  std::copy_n(values.x_mid, n * c.hidden, x_out);
  matmul(n, c.hidden, c.ffn, activated_.data(), w.down.data(), x_out, Accumulate::kAdd);
}

void LayerBackward::attend(const Tile& tile, std::span<const BandGradient<float>> key_gradients, float* d_x,
                           float* d_normed) {
  forward(tile, again_.at(0), nullptr);
  attend(tile, again_.at(0), key_gradients, d_x, d_normed);
}

void LayerBackward::attend(const Tile& tile, const LayerValues& values,
                           std::span<const BandGradient<float>> key_gradients, float* d_x, float* d_normed) {
  check(tile.n <= tile_, "a tile holds the tokens given to it");
  const ModelConfig& c = weights_.config;
  const LayerWeights& w = layer(tile.layer);
  LayerWeights& g = gradients_.layers[static_cast<size_t>(tile.layer)];
  const auto epsilon = static_cast<float>(c.rms_norm_epsilon);
  const int64_t n = tile.n;
  rmsnorm(n, c.hidden, tile.x, w.attention_norm.data(), epsilon, normed_.data());
  rmsnorm(n, c.hidden, values.x_mid, w.mlp_norm.data(), epsilon, mlp_normed_.data());
  swiglu(n, c.ffn, values.gate_up, activated_.data());

  // The MLP, down to x_mid.
  matmul_input_gradient(n, c.hidden, c.ffn, d_x, w.down.data(), d_activated_.data());
  matmul_weight_gradient(n, c.hidden, c.ffn, d_x, activated_.data(), g.down.data());
  swiglu_backward(n, c.ffn, values.gate_up, d_activated_.data(), d_gate_up_.data());
  matmul_input_gradient(n, 2 * c.ffn, c.hidden, d_gate_up_.data(), w.gate_up.data(), d_mlp_normed_.data());
  matmul_weight_gradient(n, 2 * c.ffn, c.hidden, d_gate_up_.data(), mlp_normed_.data(), g.gate_up.data());
  rmsnorm_backward(n, c.hidden, values.x_mid, w.mlp_norm.data(), epsilon, d_mlp_normed_.data(), d_x,
                   g.mlp_norm.data());

  // Attention, down to the normed input through Q, and to the keys and values.
  matmul_input_gradient(n, c.hidden, c.q_size(), d_x, w.o.data(), d_attended_.data());
  matmul_weight_gradient(n, c.hidden, c.q_size(), d_x, values.attended, g.o.data());
  AttentionGradient<float> attention;
  attention.forward = attention_of(tile, values);
  attention.d_out = d_attended_.data();
  attention.dq = d_q_.data();
  attention.d_bands = key_gradients;
  attention.d_landmark_bias = g.landmark_bias.data();
  attention_backward(attention);
  rotary(n, c.heads, c.head_dim, frequencies_, static_cast<double>(tile.first_position), 1, d_q_.data(),
         RotaryDirection::kBackward);
  matmul_input_gradient(n, c.q_size(), c.hidden, d_q_.data(), w.q.data(), d_normed);
  matmul_weight_gradient(n, c.q_size(), c.hidden, d_q_.data(), normed_.data(), g.q.data());
}

void LayerBackward::keys(int64_t index, int64_t n, const float* x, const float* dk, const float* dv,
                         float* d_normed, float* d_x) {
  check(n <= tile_, "a tile holds the tokens given to it");
  const ModelConfig& c = weights_.config;
  const LayerWeights& w = layer(index);
  LayerWeights& g = gradients_.layers[static_cast<size_t>(index)];
  const auto epsilon = static_cast<float>(c.rms_norm_epsilon);
  rmsnorm(n, c.hidden, x, w.attention_norm.data(), epsilon, normed_.data());
  matmul_input_gradient(n, c.kv_size(), c.hidden, dk, w.k.data(), d_normed, Accumulate::kAdd);
  matmul_weight_gradient(n, c.kv_size(), c.hidden, dk, normed_.data(), g.k.data());
  matmul_input_gradient(n, c.kv_size(), c.hidden, dv, w.v.data(), d_normed, Accumulate::kAdd);
  matmul_weight_gradient(n, c.kv_size(), c.hidden, dv, normed_.data(), g.v.data());
  rmsnorm_backward(n, c.hidden, x, w.attention_norm.data(), epsilon, d_normed, d_x, g.attention_norm.data());
}

void LayerBackward::rotate_back(int64_t n, double first_position, double step, float* k) const {
  const ModelConfig& c = weights_.config;
  rotary(n, c.kv_heads, c.head_dim, frequencies_, first_position, step, k, RotaryDirection::kBackward);
}

}  // namespace longhalo

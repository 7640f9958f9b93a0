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
      normed_(tile * weights.config.hidden, "normed activations of a tile"),
      x_mid_(tile * weights.config.hidden, "activations between attention and MLP of a tile"),
      mlp_normed_(tile * weights.config.hidden, "normed activations of a tile"),
      q_(tile * weights.config.q_size(), "queries of a tile"),
      attended_(tile * weights.config.q_size(), "attention output of a tile"),
      lse_(tile * weights.config.heads, "softmax normalisers of a tile"),
      gate_up_(tile * 2 * weights.config.ffn, "gate and up activations of a tile"),
      activated_(tile * weights.config.ffn, "MLP activations of a tile"),
      d_gate_up_(tile * 2 * weights.config.ffn, "gradients of gate and up of a tile"),
      d_activated_(tile * weights.config.ffn, "gradients of MLP activations of a tile"),
      d_mlp_normed_(tile * weights.config.hidden, "gradients of normed activations of a tile"),
      d_attended_(tile * weights.config.q_size(), "gradients of the attention output of a tile"),
      d_q_(tile * weights.config.q_size(), "gradients of queries of a tile") {
  check(tile >= 1, "a tile has at least one token");
}

void LayerBackward::attend(int64_t index, int64_t n, int64_t first_position, const int64_t* doc_start,
                           std::span<const BandKeys<float>> bands,
                           std::span<const BandGradient<float>> key_gradients, const float* x, float* d_x,
                           float* d_normed) {
  check(n <= tile_, "a tile holds the tokens given to it");
  const ModelConfig& c = weights_.config;
  const LayerWeights& w = layer(index);
  LayerWeights& g = gradients_.layers[static_cast<size_t>(index)];
  const auto epsilon = static_cast<float>(c.rms_norm_epsilon);

  // Forward again, as Layer::attend() does it.
  rmsnorm(n, c.hidden, x, w.attention_norm.data(), epsilon, normed_.data());
  matmul(n, c.q_size(), c.hidden, normed_.data(), w.q.data(), q_.data());
  rotary(n, c.heads, c.head_dim, frequencies_, static_cast<double>(first_position), 1, q_.data());
  AttentionGradient<float> attention;
  Attention<float>& forward = attention.forward;
  forward.heads = c.heads;
  forward.kv_heads = c.kv_heads;
  forward.head_dim = c.head_dim;
  forward.scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
  forward.queries = n;
  forward.first_query = first_position;
  forward.q = q_.data();
  forward.bands = bands;
  forward.landmark_bias = w.landmark_bias.data();
  forward.doc_start = doc_start;
  forward.out = attended_.data();
  forward.lse = lse_.data();
  attention_forward(forward);
  std::copy_n(x, n * c.hidden, x_mid_.data());
  matmul(n, c.hidden, c.q_size(), attended_.data(), w.o.data(), x_mid_.data(), Accumulate::kAdd);
  rmsnorm(n, c.hidden, x_mid_.data(), w.mlp_norm.data(), epsilon, mlp_normed_.data());
  matmul(n, 2 * c.ffn, c.hidden, mlp_normed_.data(), w.gate_up.data(), gate_up_.data());
  swiglu(n, c.ffn, gate_up_.data(), activated_.data());

  // The MLP, down to x_mid.
  matmul_input_gradient(n, c.hidden, c.ffn, d_x, w.down.data(), d_activated_.data());
  matmul_weight_gradient(n, c.hidden, c.ffn, d_x, activated_.data(), g.down.data());
  swiglu_backward(n, c.ffn, gate_up_.data(), d_activated_.data(), d_gate_up_.data());
  matmul_input_gradient(n, 2 * c.ffn, c.hidden, d_gate_up_.data(), w.gate_up.data(), d_mlp_normed_.data());
  matmul_weight_gradient(n, 2 * c.ffn, c.hidden, d_gate_up_.data(), mlp_normed_.data(), g.gate_up.data());
  rmsnorm_backward(n, c.hidden, x_mid_.data(), w.mlp_norm.data(), epsilon, d_mlp_normed_.data(), d_x,
                   g.mlp_norm.data());

  // Attention, down to the normed input through Q, and to the keys and values.
  matmul_input_gradient(n, c.hidden, c.q_size(), d_x, w.o.data(), d_attended_.data());
  matmul_weight_gradient(n, c.hidden, c.q_size(), d_x, attended_.data(), g.o.data());
  attention.d_out = d_attended_.data();
  attention.dq = d_q_.data();
  attention.d_bands = key_gradients;
  attention.d_landmark_bias = g.landmark_bias.data();
  attention_backward(attention);
  rotary(n, c.heads, c.head_dim, frequencies_, static_cast<double>(first_position), 1, d_q_.data(),
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

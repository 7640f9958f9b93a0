#include "model/layer.hpp"

#include <algorithm>
#include <cmath>

#include "core/clock.hpp"
#include "kernels/matmul/matmul.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/rotary/rotary.hpp"
#include "kernels/swiglu/swiglu.hpp"

namespace longhalo {

Layer::Layer(const Weights& weights, int64_t tile)
    : weights_(weights),
      tile_(tile),
      frequencies_(rotary_frequencies(weights.config.head_dim, weights.config.rope_theta,
                                      weights.config.rope_scaling ? &*weights.config.rope_scaling : nullptr)),
      normed_(tile * weights.config.hidden, "normed activations of a tile"),
      q_(tile * weights.config.q_size(), "queries of a tile"),
      attended_(tile * weights.config.q_size(), "attention output of a tile"),
      gate_up_(tile * 2 * weights.config.ffn, "gate and up activations of a tile"),
      activated_(tile * weights.config.ffn, "MLP activations of a tile") {
  check(tile >= 1, "a tile has at least one token");
}

void Layer::project_keys(int64_t layer, int64_t n, const float* x, float* k, float* v) {
  const Stopwatch watch;
  const ModelConfig& c = weights_.config;
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  check(n <= tile_, "a tile holds the tokens given to it");
  rmsnorm(n, c.hidden, x, w.attention_norm.data(), static_cast<float>(c.rms_norm_epsilon), normed_.data());
  matmul(n, c.kv_size(), c.hidden, normed_.data(), w.k.data(), k);
  matmul(n, c.kv_size(), c.hidden, normed_.data(), w.v.data(), v);
  times_.keys += watch.seconds();
}

int64_t Layer::summarise(int64_t layer, int64_t strided_band, int64_t stride, int64_t n, const float* k,
                         const float* v, int64_t first_segment, LandmarkPoolState& open, float* kbar,
                         float* vbar) {
  const Stopwatch watch;
  const ModelConfig& c = weights_.config;
  const auto& queries = weights_.layers[static_cast<size_t>(layer)].landmark_query;
  const float* u = queries.empty() ? nullptr : queries[static_cast<size_t>(strided_band)].data();
  const int64_t completed = landmark_pool({c.kv_heads, c.head_dim, stride, u}, n, k, v, open, kbar, vbar);
  const double centre = static_cast<double>(first_segment * stride) + static_cast<double>(stride - 1) / 2;
  rotary(completed, c.kv_heads, c.head_dim, frequencies_, centre, static_cast<double>(stride), kbar);
  times_.keys += watch.seconds();
  return completed;
}

void Layer::rotate_keys(int64_t n, int64_t first_position, float* k) {
  const Stopwatch watch;
  const ModelConfig& c = weights_.config;
  rotary(n, c.kv_heads, c.head_dim, frequencies_, static_cast<double>(first_position), 1, k);
  times_.keys += watch.seconds();
}

void Layer::attend(int64_t layer, int64_t n, int64_t first_position, std::span<const BandKeys<float>> bands,
                   float* x, const int64_t* doc_start) {
  const ModelConfig& c = weights_.config;
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const auto epsilon = static_cast<float>(c.rms_norm_epsilon);
  check(n <= tile_, "a tile holds the tokens given to it");

  Stopwatch watch;
  rmsnorm(n, c.hidden, x, w.attention_norm.data(), epsilon, normed_.data());
  matmul(n, c.q_size(), c.hidden, normed_.data(), w.q.data(), q_.data());
  rotary(n, c.heads, c.head_dim, frequencies_, static_cast<double>(first_position), 1, q_.data());
  times_.queries += watch.seconds();

  watch.restart();
  Attention<float> attention;
  attention.heads = c.heads;
  attention.kv_heads = c.kv_heads;
  attention.head_dim = c.head_dim;
  attention.scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
  attention.queries = n;
  attention.first_query = first_position;
  attention.q = q_.data();
  attention.bands = bands;
  attention.landmark_bias = w.landmark_bias.data();
  attention.doc_start = doc_start;
  attention.out = attended_.data();
  attention_forward(attention);
  times_.attention += watch.seconds();

  watch.restart();
  matmul(n, c.hidden, c.q_size(), attended_.data(), w.o.data(), x, Accumulate::kAdd);
  rmsnorm(n, c.hidden, x, w.mlp_norm.data(), epsilon, normed_.data());
  matmul(n, 2 * c.ffn, c.hidden, normed_.data(), w.gate_up.data(), gate_up_.data());
  swiglu(n, c.ffn, gate_up_.data(), activated_.data());
  matmul(n, c.hidden, c.ffn, activated_.data(), w.down.data(), x, Accumulate::kAdd);
  times_.mlp += watch.seconds();
}

void embed_tokens(const Weights& weights, std::span<const int32_t> tokens, float* x) {
  const int64_t hidden = weights.config.hidden;
  for (const int32_t token : tokens) {
    check(token >= 0 && token < weights.config.vocabulary, "a token id lies inside the vocabulary");
    x = std::copy_n(weights.embedding.data() + token * hidden, hidden, x);
  }
}

void final_norm(const Weights& weights, int64_t n, const float* x, float* hidden) {
  rmsnorm(n, weights.config.hidden, x, weights.final_norm.data(),
          static_cast<float>(weights.config.rms_norm_epsilon), hidden);
}

void logits_of(const Weights& weights, int64_t n, const float* hidden, float* logits) {
  matmul(n, weights.config.vocabulary, weights.config.hidden, hidden, weights.head(), logits);
}

}  // namespace longhalo

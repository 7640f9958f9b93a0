#include "support/reference_model.hpp"

#include <cmath>
#include <limits>
#include <random>

#include "kernels/attention/attention.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"
#include "kernels/matmul/matmul.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/rotary/rotary.hpp"
#include "kernels/swiglu/swiglu.hpp"

namespace longhalo::test {
namespace {

using Doubles = std::vector<double>;

Doubles wide(const HostBuffer<float>& values) {
  return {values.data(), values.data() + values.size()};
}

Doubles zeros(int64_t count) {
  return Doubles(static_cast<size_t>(count));
}

Doubles normed(int64_t n, const Doubles& x, const HostBuffer<float>& weight, const ModelConfig& c) {
  Doubles out = zeros(n * c.hidden);
  rmsnorm_reference(n, c.hidden, x.data(), wide(weight).data(), c.rms_norm_epsilon, out.data());
  return out;
}

Doubles product(int64_t n, int64_t out_size, int64_t in_size, const Doubles& a, const HostBuffer<float>& w) {
  Doubles out = zeros(n * out_size);
  matmul_reference(n, out_size, in_size, a.data(), wide(w).data(), out.data());
  return out;
}

void add(Doubles& x, const Doubles& y) {
  for (size_t i = 0; i < x.size(); ++i)
    x[i] += y[i];
}

Doubles attend(const LayerWeights& w, const ModelConfig& c, const AttentionPattern& pattern, int64_t n,
               const Doubles& x, std::span<const int64_t> doc_start) {
  const std::vector<double> frequencies =
      rotary_frequencies(c.head_dim, c.rope_theta, c.rope_scaling ? &*c.rope_scaling : nullptr);
  const Doubles h = normed(n, x, w.attention_norm, c);
  Doubles q = product(n, c.q_size(), c.hidden, h, w.q);
  const Doubles raw_k = product(n, c.kv_size(), c.hidden, h, w.k);
  const Doubles v = product(n, c.kv_size(), c.hidden, h, w.v);
  Doubles k = raw_k;
  rotary_reference(n, c.heads, c.head_dim, frequencies, 0, 1, q.data());
  rotary_reference(n, c.kv_heads, c.head_dim, frequencies, 0, 1, k.data());

  std::vector<Doubles> kept;  // keeps the landmarks' memory in place
  kept.reserve(2 * pattern.bands.size());
  std::vector<BandKeys<double>> bands;
  size_t strided = 0;
  for (const Band& band : pattern.bands) {
    if (band.stride == 1) {
      bands.push_back({band, k.data(), v.data(), 0, n});
      continue;
    }
    const int64_t segments = n / band.stride;
    Doubles& kbar = kept.emplace_back(zeros(segments * c.kv_size()));
    Doubles& vbar = kept.emplace_back(zeros(segments * c.kv_size()));
    const Doubles u = w.landmark_query.empty() ? zeros(c.kv_size()) : wide(w.landmark_query[strided]);
    landmark_pool_reference(n, c.kv_heads, c.head_dim, band.stride, u.data(), raw_k.data(), v.data(),
                            kbar.data(), vbar.data());
    rotary_reference(segments, c.kv_heads, c.head_dim, frequencies, static_cast<double>(band.stride - 1) / 2,
                     static_cast<double>(band.stride), kbar.data());
    bands.push_back({band, kbar.data(), vbar.data(), 0, segments});
    ++strided;
  }
  const Doubles bias = wide(w.landmark_bias);
  Doubles out = zeros(n * c.q_size());
  Attention<double> attention;
  attention.heads = c.heads;
  attention.kv_heads = c.kv_heads;
  attention.head_dim = c.head_dim;
  attention.scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  attention.queries = n;
  attention.q = q.data();
  attention.bands = bands;
  attention.landmark_bias = bias.data();
  attention.doc_start = doc_start.empty() ? nullptr : doc_start.data();
  attention.out = out.data();
  attention_reference(attention);
  return product(n, c.hidden, c.q_size(), out, w.o);
}

Doubles mlp(const LayerWeights& w, const ModelConfig& c, int64_t n, const Doubles& x) {
  const Doubles gate_up = product(n, 2 * c.ffn, c.hidden, normed(n, x, w.mlp_norm, c), w.gate_up);
  Doubles activated = zeros(n * c.ffn);
  swiglu_reference(n, c.ffn, gate_up.data(), activated.data());
  return product(n, c.hidden, c.ffn, activated, w.down);
}

template <class Reference>
double error(std::span<const float> a, std::span<const Reference> b) {
  double difference = 0, norm = 0;
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i])) return std::numeric_limits<double>::infinity();
    difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

}  // namespace

std::vector<double> reference_hidden(const Weights& weights, const AttentionPattern& pattern,
                                     std::span<const int32_t> tokens, std::span<const int64_t> doc_start) {
  const ModelConfig& c = weights.config;
  const auto n = static_cast<int64_t>(tokens.size());
  Doubles x;
  for (const int32_t token : tokens)
    x.insert(x.end(), weights.embedding.data() + token * c.hidden,
             weights.embedding.data() + (token + 1) * c.hidden);
  for (const LayerWeights& layer : weights.layers) {
    add(x, attend(layer, c, pattern, n, x, doc_start));
    add(x, mlp(layer, c, n, x));
  }
  return normed(n, x, weights.final_norm, c);
}

double reference_loss(const Weights& weights, const AttentionPattern& pattern,
                      std::span<const int32_t> tokens, std::span<const int32_t> labels,
                      std::span<const int64_t> doc_start, double z_loss) {
  const ModelConfig& c = weights.config;
  const Doubles hidden = reference_hidden(weights, pattern, tokens, doc_start);
  double loss = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (labels[i] < 0) continue;
    const double* row = hidden.data() + i * static_cast<size_t>(c.hidden);
    double sum = 0, of_label = 0;
    for (int64_t v = 0; v < c.vocabulary; ++v) {
      double logit = 0;
      for (int64_t e = 0; e < c.hidden; ++e)
        logit += row[e] * static_cast<double>(weights.head()[v * c.hidden + e]);
      sum += std::exp(logit);
      if (v == labels[i]) of_label = logit;
    }
    const double normaliser = std::log(sum);
    loss += normaliser - of_label + z_loss * normaliser * normaliser;
  }
  return loss;
}

Weights small_model(int64_t layers, int64_t heads, int64_t kv_heads, int64_t strided_bands, uint64_t seed) {
  ModelConfig config;
  config.layers = layers;
  config.hidden = 48;
  config.ffn = 80;
  config.heads = heads;
  config.kv_heads = kv_heads;
  config.head_dim = 16;
  config.vocabulary = 97;
  return small_model(config, strided_bands, seed);
}

Weights small_model(const ModelConfig& config, int64_t strided_bands, uint64_t seed) {
  Weights weights = random_weights(config, {strided_bands, {}}, seed);
  std::mt19937_64 generator(seed + 1);
  std::normal_distribution<float> normal;
  for (LayerWeights& layer : weights.layers) {
    for (HostBuffer<float>* norm : {&layer.attention_norm, &layer.mlp_norm})
      for (float& value : norm->span())
        value = 1 + 0.2F * normal(generator);
    for (float& value : layer.landmark_bias.span())
      value = normal(generator);
    for (int64_t band = 0; band < strided_bands; ++band) {
      HostBuffer<float>& query = layer.landmark_query.emplace_back(config.kv_size());
      for (float& value : query.span())
        value = normal(generator);
    }
  }
  return weights;
}

std::vector<int32_t> random_tokens(int64_t count, int64_t vocabulary, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::uniform_int_distribution<int32_t> any(0, static_cast<int32_t>(vocabulary) - 1);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens)
    token = any(generator);
  return tokens;
}

double relative_error(std::span<const float> a, std::span<const double> b) {
  return error(a, b);
}
double relative_error(std::span<const float> a, std::span<const float> b) {
  return error(a, b);
}

}  // namespace longhalo::test

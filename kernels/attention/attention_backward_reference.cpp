#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention/attention_backward.hpp"
#include "kernels/attention/attention_checks.hpp"

namespace longhalo {
namespace {

struct Pair {
  const double* k;
  const double* v;
  double* dk;
  double* dv;
  bool strided;
  double weight;  // the score, then the softmax
};

double dot(int64_t d, const double* a, const double* b) {
  double sum = 0;
  for (int64_t c = 0; c < d; ++c)
    sum += a[c] * b[c];
  return sum;
}

// The keys that row `row` of q sees, for query head h.
std::vector<Pair> pairs(const AttentionGradient<double>& gradient, int64_t row, int64_t h) {
  const Attention<double>& p = gradient.forward;
  const int64_t i = p.first_query + row, d = p.head_dim, kv_head = h / (p.heads / p.kv_heads);
  std::vector<Pair> pairs;
  for (size_t b = 0; b < p.bands.size(); ++b) {
    const BandKeys<double>& keys = p.bands[b];
    for (int64_t r = 0; r < keys.count; ++r) {
      const int64_t first = (keys.first_key + r) * keys.band.stride, last = first + keys.band.stride - 1;
      const bool seen = first <= i - keys.band.near && last > i - keys.band.far && last <= i &&
                        first >= (p.doc_start != nullptr ? p.doc_start[row] : 0);
      if (!seen) continue;
      const int64_t at = (r * p.kv_heads + kv_head) * d;
      const bool strided = keys.band.stride > 1;
      const double bias = strided && p.landmark_bias != nullptr ? p.landmark_bias[h] : 0;
      pairs.push_back({keys.k + at, keys.v + at, gradient.d_bands[b].dk + at, gradient.d_bands[b].dv + at,
                       strided, p.scale * dot(d, p.q + (row * p.heads + h) * d, keys.k + at) + bias});
    }
  }
  double top = -std::numeric_limits<double>::infinity(), sum = 0;
  for (const Pair& pair : pairs)
    top = std::max(top, pair.weight);
  for (Pair& pair : pairs)
    sum += pair.weight = std::exp(pair.weight - top);
  for (Pair& pair : pairs)
    pair.weight /= sum;
  return pairs;
}

}  // namespace

void attention_backward_reference(const AttentionGradient<double>& gradient) {
  check_attention_gradient(gradient);
  const Attention<double>& p = gradient.forward;
  const int64_t d = p.head_dim;
  for (int64_t row = 0; row < p.queries; ++row) {
    for (int64_t h = 0; h < p.heads; ++h) {
      const double* q = p.q + (row * p.heads + h) * d;
      const double* d_out = gradient.d_out + (row * p.heads + h) * d;
      double* dq = gradient.dq + (row * p.heads + h) * d;
      std::fill_n(dq, d, 0.0);
      const std::vector<Pair> seen = pairs(gradient, row, h);
      double inner = 0;  // out . d_out
      for (const Pair& pair : seen)
        inner += pair.weight * dot(d, d_out, pair.v);
      for (const Pair& pair : seen) {
        const double ds = pair.weight * (dot(d, d_out, pair.v) - inner);
        for (int64_t c = 0; c < d; ++c) {
          dq[c] += p.scale * ds * pair.k[c];
          pair.dk[c] += p.scale * ds * q[c];
          pair.dv[c] += pair.weight * d_out[c];
        }
        if (pair.strided && gradient.d_landmark_bias != nullptr) gradient.d_landmark_bias[h] += ds;
      }
    }
  }
}

}  // namespace longhalo

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention/attention.hpp"
#include "kernels/attention/attention_checks.hpp"

namespace longhalo {
namespace {

// The condition of bands.hpp, word for word, with the segment complete. It does not use visible_keys(): the
// tests compare the two.
bool sees(const Band& band, int64_t i, int64_t g, int64_t doc_start) {
  const int64_t first = g * band.stride;
  const int64_t last = (g + 1) * band.stride - 1;
  return first <= i - band.near && last > i - band.far && last <= i && first >= doc_start;
}

}  // namespace

void attention_reference(const Attention<double>& p) {
  check_attention(p);
  const int64_t group = p.heads / p.kv_heads;
  const int64_t d = p.head_dim;
  std::vector<double> scores;
  std::vector<const double*> values;
  for (int64_t row = 0; row < p.queries; ++row) {
    const int64_t i = p.first_query + row;
    const int64_t doc_start = p.doc_start != nullptr ? p.doc_start[row] : 0;
    for (int64_t h = 0; h < p.heads; ++h) {
      const double* q = p.q + (row * p.heads + h) * d;
      double* out = p.out + (row * p.heads + h) * d;
      scores.clear();
      values.clear();
      for (const BandKeys<double>& keys : p.bands) {
        const double bias = keys.band.stride > 1 && p.landmark_bias != nullptr ? p.landmark_bias[h] : 0;
        for (int64_t r = 0; r < keys.count; ++r) {
          if (!sees(keys.band, i, keys.first_key + r, doc_start)) continue;
          const int64_t at = (r * p.kv_heads + h / group) * d;
          double dot = 0;
          for (int64_t c = 0; c < d; ++c)
            dot += q[c] * keys.k[at + c];
          scores.push_back(p.scale * dot + bias);
          values.push_back(keys.v + at);
        }
      }
      double top = -std::numeric_limits<double>::infinity();
      for (double s : scores)
        top = std::max(top, s);
      double sum = 0;
      std::fill(out, out + d, 0.0);
      for (size_t j = 0; j < scores.size(); ++j) {
        const double weight = std::exp(scores[j] - top);
        sum += weight;
        for (int64_t c = 0; c < d; ++c)
          out[c] += weight * values[j][c];
      }
      if (!scores.empty())
        for (int64_t c = 0; c < d; ++c)
          out[c] /= sum;
      if (p.lse != nullptr) p.lse[h * p.queries + row] = scores.empty() ? top : top + std::log(sum);
    }
  }
}

}  // namespace longhalo

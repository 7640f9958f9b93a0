#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention/attention.hpp"
#include "kernels/attention/attention_checks.hpp"

namespace longhalo {

void attention_forward(const Attention<float>& p) {
  check_attention(p);
  const int64_t group = p.heads / p.kv_heads;
  const int64_t d = p.head_dim;
#pragma omp parallel for schedule(dynamic, 16)
  for (int64_t row = 0; row < p.queries; ++row) {
    for (int64_t h = 0; h < p.heads; ++h) {
      const float* q = p.q + (row * p.heads + h) * d;
      float out[kMaxHeadDim] = {};
      float top = -std::numeric_limits<float>::infinity();
      float sum = 0;
      for (const BandKeys<float>& keys : p.bands) {
        const float bias = keys.band.stride > 1 && p.landmark_bias != nullptr ? p.landmark_bias[h] : 0;
        const KeyRange seen =
            visible_keys(keys.band, p.first_query + row, p.doc_start != nullptr ? p.doc_start[row] : 0);
        const int64_t end = std::min(seen.end - keys.first_key, keys.count);
        for (int64_t r = std::max<int64_t>(seen.begin - keys.first_key, 0); r < end; ++r) {
          const int64_t at = (r * p.kv_heads + h / group) * d;
          float dot = 0;
#pragma omp simd reduction(+ : dot)
          for (int64_t c = 0; c < d; ++c)
            dot += q[c] * keys.k[at + c];
          const float score = p.scale * dot + bias;
          if (score > top) {
            const float shrink = std::exp(top - score);
            sum *= shrink;
            for (int64_t c = 0; c < d; ++c)
              out[c] *= shrink;
            top = score;
          }
          const float weight = std::exp(score - top);
          sum += weight;
          for (int64_t c = 0; c < d; ++c)
            out[c] += weight * keys.v[at + c];
        }
      }
      for (int64_t c = 0; c < d; ++c)
        p.out[(row * p.heads + h) * d + c] = sum > 0 ? out[c] / sum : out[c];
      if (p.lse != nullptr) p.lse[h * p.queries + row] = sum > 0 ? top + std::log(sum) : top;
    }
  }
}

}  // namespace longhalo

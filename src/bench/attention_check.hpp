// Verifies what the attention benchmark timed: a sample of (query, head) rows of the result against the fp64
// definition, computed on the host from exactly the keys around what those rows see. So a problem far too
// large for the definition is checked in seconds, wherever its arrays lie.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/attention/attention.hpp"

namespace longhalo {

/// Keys and values of one KV head, widened: [count, d] each.
struct WideKeys {
  std::vector<double> k, v;
};

/// A problem and its result, as the check reads them.
struct AttentionReader {
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  double scale = 0;
  int64_t queries = 0, first_query = 0;
  std::vector<BandKeys<double>> bands;  // band, first_key and count; no arrays
  std::vector<double> landmark_bias;    // [H]
  std::function<std::vector<double>(int64_t row, int64_t head)> query, result;  // [d]
  /// Rows [first_row, first_row + count) of band number `band`.
  std::function<WideKeys(size_t band, int64_t kv_head, int64_t first_row, int64_t count)> keys;
};

/// Relative Frobenius error of `samples` rows: the first and the last query, the others drawn by `seed`;
/// infinite where the result is not finite.
double sampled_attention_error(const AttentionReader& reader, int64_t samples, uint64_t seed);

/// Keys of each band that queries [first_query, first_query + queries) may see, of those that exist by then:
/// the window's begin just before the first query, summaries begin at 0. No arrays.
template <class T>
std::vector<BandKeys<T>> existing_keys(std::span<const Band> bands, int64_t first_query, int64_t queries) {
  std::vector<BandKeys<T>> keys;
  const int64_t end = first_query + queries;
  for (const Band& band : bands) {
    BandKeys<T> one;
    one.band = band;
    if (band.stride == 1 && band.far <= first_query) one.first_key = first_query - band.far + 1;
    one.count = end / band.stride - one.first_key;
    keys.push_back(one);
  }
  return keys;
}

}  // namespace longhalo

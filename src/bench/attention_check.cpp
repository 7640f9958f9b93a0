#include "bench/attention_check.hpp"

#include <algorithm>
#include <cmath>
#include <random>

#include "bench/timed_runs.hpp"

namespace longhalo {
namespace {

// Rows read beyond what is visible on either side, so that the definition itself decides where a band ends.
constexpr int64_t kMargin = 2;

std::vector<double> exact_row(const AttentionReader& reader, int64_t row, int64_t head) {
  const int64_t i = reader.first_query + row, kv_head = head / (reader.heads / reader.kv_heads);
  std::vector<WideKeys> memory;
  std::vector<BandKeys<double>> bands;
  for (size_t b = 0; b < reader.bands.size(); ++b) {
    BandKeys<double> keys = reader.bands[b];
    const KeyRange seen = visible_keys(keys.band, i);
    const int64_t last = keys.first_key + keys.count;
    const int64_t begin = std::clamp(seen.begin - kMargin, keys.first_key, last);
    const int64_t end = std::clamp(seen.end + kMargin, begin, last);
    memory.push_back(reader.keys(b, kv_head, begin - keys.first_key, end - begin));
    keys.first_key = begin;
    keys.count = end - begin;
    keys.k = memory.back().k.data();
    keys.v = memory.back().v.data();
    bands.push_back(keys);
  }
  const std::vector<double> q = reader.query(row, head);
  std::vector<double> out(static_cast<size_t>(reader.head_dim));
  Attention<double> one;
  one.heads = one.kv_heads = one.queries = 1;
  one.head_dim = reader.head_dim;
  one.scale = reader.scale;
  one.first_query = i;
  one.q = q.data();
  one.bands = bands;
  one.landmark_bias = reader.landmark_bias.data() + head;
  one.out = out.data();
  attention_reference(one);
  return out;
}

}  // namespace

double sampled_attention_error(const AttentionReader& reader, int64_t samples, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::uniform_int_distribution<int64_t> any_row(0, reader.queries - 1), any_head(0, reader.heads - 1);
  double difference = 0, norm = 0;
  for (int64_t sample = 0; sample < samples; ++sample) {
    const int64_t row = sample == 0 ? 0 : sample == 1 ? reader.queries - 1 : any_row(generator);
    const int64_t head = any_head(generator);
    const std::vector<double> exact = exact_row(reader, row, head), found = reader.result(row, head);
    for (size_t c = 0; c < exact.size(); ++c) {
      difference += std::pow(found[c] - exact[c], 2);
      norm += exact[c] * exact[c];
    }
  }
  return finite_or_infinite(std::sqrt(difference / norm));
}

}  // namespace longhalo

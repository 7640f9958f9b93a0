#include "kernels/attention/attention_decode.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "device/host_buffer.hpp"
#include "kernels/attention/attention_checks.hpp"

namespace longhalo {
namespace {

// At most about 32 parts in all, so that what they leave to merge stays small, and no part too short to be
// worth a thread's while.
constexpr int64_t kParts = 32;
constexpr int64_t kShortestPart = 128;

struct Part {
  size_t band;
  int64_t begin, end;
};

// For each band: what each query sees, as rows of that band's keys, and the parts that cover all of it.
struct Split {
  std::vector<std::vector<int64_t>> begin, end;  // [bands][rows]
  std::vector<Part> parts;
};

Split split_keys(const Attention<float>& p, int64_t group) {
  Split split;
  std::vector<KeyRange> seen_by_any;
  int64_t total = 0;
  for (const BandKeys<float>& keys : p.bands) {
    std::vector<int64_t> begin, end;
    KeyRange any{std::numeric_limits<int64_t>::max(), 0};
    for (int64_t query = 0; query < p.queries; ++query) {
      const KeyRange seen =
          visible_keys(keys.band, p.first_query + query, p.doc_start != nullptr ? p.doc_start[query] : 0);
      const KeyRange rows{std::max<int64_t>(0, seen.begin - keys.first_key),
                          std::min(keys.count, seen.end - keys.first_key)};
      begin.insert(begin.end(), static_cast<size_t>(group), rows.begin);
      end.insert(end.end(), static_cast<size_t>(group), rows.end);
      if (rows.count() == 0) continue;
      any.begin = std::min(any.begin, rows.begin);
      any.end = std::max(any.end, rows.end);
    }
    split.begin.push_back(std::move(begin));
    split.end.push_back(std::move(end));
    seen_by_any.push_back(any);
    total += any.count();
  }
  const int64_t length =
      (std::max(kShortestPart, total / kParts) + kDecodeTile - 1) / kDecodeTile * kDecodeTile;
  for (size_t b = 0; b < seen_by_any.size(); ++b)
    for (int64_t at = seen_by_any[b].begin; at < seen_by_any[b].end; at += length)
      split.parts.push_back({b, at, std::min(at + length, seen_by_any[b].end)});
  return split;
}

// What the parts of one row leave, merged by their maxima and sums.
void merge_row(const Attention<float>& p, const HostBuffer<float>& out, const HostBuffer<float>& top,
               const HostBuffer<float>& sum, int64_t parts, int64_t rows, int64_t row, float* to,
               float* lse) {
  float highest = -std::numeric_limits<float>::infinity();
  for (int64_t part = 0; part < parts; ++part)
    if (sum[part * rows + row] != 0) highest = std::max(highest, top[part * rows + row]);
  double total = 0;
  double weighed[kMaxHeadDim] = {};
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t at = part * rows + row;
    if (sum[at] == 0) continue;  // it saw nothing there
    const double factor = std::exp2(static_cast<double>(top[at]) - static_cast<double>(highest));
    total += factor * static_cast<double>(sum[at]);
    for (int64_t c = 0; c < p.head_dim; ++c)
      weighed[c] += factor * static_cast<double>(out[at * p.head_dim + c]);
  }
  for (int64_t c = 0; c < p.head_dim; ++c)
    to[c] = total == 0 ? 0.0F : static_cast<float>(weighed[c] / total);
  if (lse == nullptr) return;
  const double log2_sum = static_cast<double>(highest) + std::log2(total);
  *lse =
      total == 0 ? -std::numeric_limits<float>::infinity() : static_cast<float>(log2_sum * std::numbers::ln2);
}

}  // namespace

void attention_decode_forward(const Attention<float>& p) {
  const int64_t group = p.heads / p.kv_heads, d = p.head_dim;
  const int64_t rows = p.queries * group;  // of one KV head: (query, head of the group)
  const Split split = split_keys(p, group);
  const auto parts = static_cast<int64_t>(split.parts.size());

  HostBuffer<float> q(p.kv_heads * rows * d, "decode's queries");
  HostBuffer<float> bias(p.kv_heads * rows, "decode's landmark biases");
  const float scale = p.scale * std::numbers::log2e_v<float>;
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t head = h * group + r % group;
      const float* from = p.q + (r / group * p.heads + head) * d;
      for (int64_t c = 0; c < d; ++c)
        q[(h * rows + r) * d + c] = from[c] * scale;
      bias[h * rows + r] =
          p.landmark_bias != nullptr ? p.landmark_bias[head] * std::numbers::log2e_v<float> : 0.0F;
    }
  }

  const int64_t all_rows = p.kv_heads * rows;
  HostBuffer<float> out(parts * all_rows * d, "decode's partial results");
  HostBuffer<float> top(parts * all_rows, "decode's partial maxima"),
      sum(parts * all_rows, "decode's partial sums");
  HostBuffer<float> scores(parts * all_rows * kDecodeTile, "decode's scores");
  const AttentionDecodeKernels& kernels = LONGHALO_SIMD(attention_decode);
#pragma omp parallel for schedule(dynamic, 1) if (parts > 1)
  for (int64_t part = 0; part < parts; ++part) {
    const Part& keys = split.parts[static_cast<size_t>(part)];
    const BandKeys<float>& band = p.bands[keys.band];
    const int64_t at = part * all_rows;
    const bool biased = band.band.stride > 1 && p.landmark_bias != nullptr;
    kernels.run({p.kv_heads, rows, d, q.data(), band.k, band.v, keys.begin, keys.end,
                 split.begin[keys.band].data(), split.end[keys.band].data(), biased ? bias.data() : nullptr,
                 scores.data() + at * kDecodeTile, out.data() + at * d, top.data() + at, sum.data() + at});
  }
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t query = r / group, head = h * group + r % group;
      merge_row(p, out, top, sum, parts, all_rows, h * rows + r, p.out + (query * p.heads + head) * d,
                p.lse != nullptr ? p.lse + head * p.queries + query : nullptr);
    }
  }
}

}  // namespace longhalo

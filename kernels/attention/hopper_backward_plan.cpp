#include "kernels/attention/hopper_backward_plan.hpp"

#include <algorithm>

namespace longhalo::hopper_backward {
namespace {

constexpr int64_t kBlockTiles = 32;  // of queries, at least

// Those tiles of keys that no query before the problem's first or after its last would see.
void find_whole_tiles(const Attention<BFloat16>& p, BandPlan& one) {
  const Band& band = one.keys.band;
  if (band.far >= p.first_query + p.queries) return;
  const int64_t tokens = kKeyTile * band.stride, first = one.keys.first_key * band.stride;
  const int64_t nearest = std::max(band.near, band.stride - 1);
  const int64_t before = std::max<int64_t>(p.first_query - nearest - first, 0);
  const int64_t reached = std::max<int64_t>(p.first_query + p.queries + 1 - band.far - first, 0);
  one.whole = std::min((before + tokens - 1) / tokens, one.tiles);
  one.whole_end = std::clamp(reached / tokens, one.whole, one.tiles);
}

}  // namespace

// Landmarks are seen by nearly all queries: their items take one block of the queries each.
Plan plan_of(const AttentionGradient<BFloat16>& gradient) {
  const Attention<BFloat16>& p = gradient.forward;
  const int64_t width = p.kv_heads * p.head_dim;
  const int64_t query_tiles = (p.queries + kQueryTile - 1) / kQueryTile;
  Plan plan;
  int64_t sliced_keys = 0;
  for (size_t i = 0; i < p.bands.size(); ++i) {
    BandPlan one{p.bands[i], gradient.d_bands[i]};
    BandKeys<BFloat16>& keys = one.keys;
    if (keys.row_stride == 0) keys.row_stride = width;
    if (one.to.row_stride == 0) one.to.row_stride = width;
    const int64_t begin = std::max(visible_keys(keys.band, p.first_query).begin, keys.first_key);
    const int64_t end =
        std::min(visible_keys(keys.band, p.first_query + p.queries - 1).end, keys.first_key + keys.count);
    if (begin >= end) continue;
    const int64_t skipped = begin - keys.first_key;
    keys.k += skipped * keys.row_stride, keys.v += skipped * keys.row_stride;
    one.to.dk += skipped * one.to.row_stride, one.to.dv += skipped * one.to.row_stride;
    keys.first_key = begin, keys.count = end - begin;
    one.tiles = (keys.count + kKeyTile - 1) / kKeyTile;
    one.sliced = keys.band.stride > 1 && keys.band.far == kUnlimited;
    if (one.sliced) sliced_keys += keys.count;
    if (!one.sliced) find_whole_tiles(p, one);
    plan.bands.push_back(one);
  }
  std::stable_partition(plan.bands.begin(), plan.bands.end(),
                        [](const BandPlan& one) { return !one.sliced; });
  plan.dq = query_tiles * kQueryTile * p.heads * p.head_dim;
  // Partial sums of many landmarks are to stay below an eighth of those of dq.
  const int64_t least_tiles = 16 * sliced_keys * p.kv_heads / (kQueryTile * p.heads);
  plan.block_tiles = std::max(kBlockTiles, least_tiles);
  plan.blocks = (query_tiles + plan.block_tiles - 1) / plan.block_tiles;
  plan.partials = plan.blocks * 2 * sliced_keys * width;
  for (const BandPlan& one : plan.bands)
    if (one.keys.band.stride > 1)
      plan.bias_lines += one.tiles * (one.sliced ? plan.blocks : 1) * kConsumerWarps;
  if (gradient.d_landmark_bias == nullptr) plan.bias_lines = 0;
  plan.bias = (plan.bias_lines * p.heads + 3) / 4 * 4;
  return plan;
}

}  // namespace longhalo::hopper_backward

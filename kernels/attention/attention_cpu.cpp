#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>
#include <vector>

#include "device/host_buffer.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/attention/attention_checks.hpp"
#include "kernels/attention/attention_decode.hpp"
#include "kernels/attention/attention_tile.hpp"

namespace longhalo {
namespace {

using Problem = Attention<float>;

// Rows of q and out that one thread keeps beside each other: q and out tiles of about 96 KiB each stay in the
// L2 cache, and each key tile that is copied serves hundreds of rows.
int64_t queries_a_tile(const Problem& p, int64_t row_block) {
  const int64_t group = p.heads / p.kv_heads;
  const int64_t rows = std::max<int64_t>(row_block, 24576 / p.head_dim / row_block * row_block);
  return std::max<int64_t>(1, rows / group);
}

// One thread's memory.
struct Workspace {
  Workspace(const Problem& p, int64_t rows, int64_t row_block)
      : floats(
            2 * rows * p.head_dim + 3 * rows + p.head_dim * (2 * kKeyTile + 8) + row_block * (kKeyTile + 8),
            "an attention tile"),
        ranges(2 * rows * kMaxBands, "an attention tile's key ranges") {
    float* at = floats.data();
    const auto take = [&at](int64_t count) { return std::exchange(at, at + count); };
    scratch.q = take(rows * p.head_dim);
    scratch.out = take(rows * p.head_dim);
    scratch.p = take((kKeyTile + 8) * row_block);
    scratch.k = take((kKeyTile + 8) * p.head_dim);
    scratch.v = take(kKeyTile * p.head_dim);
    scratch.top = take(rows);
    scratch.sum = take(rows);
    bias = take(rows);
    std::fill(floats.data(), floats.data() + floats.size(), 0.0F);
  }
  HostBuffer<float> floats;
  HostBuffer<int64_t> ranges;
  TileScratch scratch;
  float* bias = nullptr;
};

struct TileRows {
  int64_t first_query, queries;  // rows of p.q
  int64_t kv_head;
  int64_t used, padded;  // rows (query, head of the group)
  int64_t block;
};

void load_queries(const Problem& p, const TileRows& rows, Workspace& work) {
  const int64_t d = p.head_dim, group = p.heads / p.kv_heads;
  const float scale = p.scale * std::numbers::log2e_v<float>;
  std::fill(work.scratch.out, work.scratch.out + rows.padded * d, 0.0F);
  std::fill(work.scratch.top, work.scratch.top + rows.padded, -std::numeric_limits<float>::infinity());
  std::fill(work.scratch.sum, work.scratch.sum + rows.padded, 0.0F);
  for (int64_t r = 0; r < rows.padded; ++r) {
    const int64_t same = std::min(r, rows.used - 1);  // rows beyond the last repeat it
    const float* q =
        p.q + ((rows.first_query + same / group) * p.heads + rows.kv_head * group + same % group) * d;
    float* to = work.scratch.q + r / rows.block * rows.block * d + r % rows.block;
    for (int64_t c = 0; c < d; ++c)
      to[c * rows.block] = q[c] * scale;
    work.bias[r] = p.landmark_bias != nullptr
                       ? p.landmark_bias[rows.kv_head * group + same % group] * std::numbers::log2e_v<float>
                       : 0.0F;
  }
}

TileBand load_band(const Problem& p, const BandKeys<float>& keys, const TileRows& rows, int index,
                   Workspace& work) {
  const int64_t group = p.heads / p.kv_heads;
  int64_t* begin = work.ranges.data() + 2 * rows.padded * index;
  int64_t* end = begin + rows.padded;
  for (int64_t r = 0; r < rows.padded; ++r) {
    const int64_t query = rows.first_query + std::min(r, rows.used - 1) / group;
    const KeyRange seen =
        visible_keys(keys.band, p.first_query + query, p.doc_start != nullptr ? p.doc_start[query] : 0);
    begin[r] = std::max<int64_t>(seen.begin - keys.first_key, 0);
    end[r] = std::min(seen.end - keys.first_key, keys.count);
  }
  return {keys.k + rows.kv_head * p.head_dim,
          keys.v + rows.kv_head * p.head_dim,
          p.kv_heads * p.head_dim,
          begin,
          end,
          keys.band.stride > 1 && p.landmark_bias != nullptr ? work.bias : nullptr};
}

void store_rows(const Problem& p, const TileRows& rows, const Workspace& work) {
  const int64_t d = p.head_dim, group = p.heads / p.kv_heads;
  for (int64_t r = 0; r < rows.used; ++r) {
    const int64_t query = rows.first_query + r / group, head = rows.kv_head * group + r % group;
    const float sum = work.scratch.sum[r];
    const float* from = work.scratch.out + r / rows.block * rows.block * d + r % rows.block;
    float* out = p.out + (query * p.heads + head) * d;
    const float factor = sum == 0 ? 0.0F : 1.0F / sum;
    for (int64_t c = 0; c < d; ++c)
      out[c] = from[c * rows.block] * factor;
    if (p.lse == nullptr) continue;
    const double log2_sum = static_cast<double>(work.scratch.top[r]) + std::log2(static_cast<double>(sum));
    p.lse[head * p.queries + query] =
        sum == 0 ? -std::numeric_limits<float>::infinity() : static_cast<float>(log2_sum * std::numbers::ln2);
  }
}

}  // namespace

void attention_forward(const Attention<float>& p) {
  check_attention(p);
  if (p.queries == 0) return;
  if (p.queries <= kDecodeQueries) return attention_decode_forward(p);
  const AttentionTileKernels& kernels = LONGHALO_SIMD(attention_tile);
  const int64_t block = kernels.row_block;
  const int64_t group = p.heads / p.kv_heads;
  const int64_t queries = std::min(queries_a_tile(p, block), p.queries);
  const int64_t most_rows = (queries * group + block - 1) / block * block;
  const int64_t tiles = (p.queries + queries - 1) / queries;
  const int threads = static_cast<int>(std::min<int64_t>(omp_get_max_threads(), tiles * p.kv_heads));
  // Made here and not inside: an exception (no memory left) must not leave a parallel region.
  std::vector<Workspace> workspaces;
  for (int i = 0; i < threads; ++i)
    workspaces.emplace_back(p, most_rows, block);
#pragma omp parallel num_threads(threads)
  {
    Workspace& work = workspaces[static_cast<size_t>(omp_get_thread_num())];
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t t = 0; t < tiles; ++t) {
      for (int64_t h = 0; h < p.kv_heads; ++h) {
        const int64_t first = t * queries, count = std::min(queries, p.queries - first);
        const int64_t used = count * group;
        const TileRows rows{first, count, h, used, (used + block - 1) / block * block, block};
        AttentionTile tile{rows.padded, p.head_dim, static_cast<int>(p.bands.size()), {}, work.scratch};
        load_queries(p, rows, work);
        for (int b = 0; b < tile.bands; ++b)
          tile.band[b] = load_band(p, p.bands[static_cast<size_t>(b)], rows, b, work);
        kernels.run(tile);
        store_rows(p, rows, work);
      }
    }
  }
}

}  // namespace longhalo

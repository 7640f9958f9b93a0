// What a block of the Hopper attention kernel works on: items (query tile, head), the key tiles that an item
// visits in each band, and the shared memory through which they flow. Positions are 64 bits wide only here,
// once an item; tiles work with rows of the bands' arrays.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/attention/bands.hpp"
#include "kernels/common/hopper.cuh"

namespace longhalo::hopper_attention {

using hopper::Ring;

inline constexpr int kKeyTile = 128;
inline constexpr int kHalfTile = 64;
inline constexpr int kWarpgroup = 128;
inline constexpr int64_t kRowLimit = int64_t{1} << 30;

template <int kDim_, int kCluster_>
struct Shape {
  static constexpr int kDim = kDim_;
  static constexpr int kCluster = kCluster_;  // blocks that share keys and values, each for a head of its own
  static constexpr int kConsumers = kDim == 128 ? 2 : 3;  // warpgroups of 64 queries
  static constexpr int kQueryTile = 64 * kConsumers;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kKeyStages = 3;
  static constexpr int kValueStages = kDim == 128 ? 2 : 3;
  static constexpr int kQueryStages = 2;
  static constexpr int kEdgeStages = 2;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  static constexpr int kQueryBytes = kQueryTile * kDim * 2;
  static constexpr int kKeyBytes = kKeyTile * kDim * 2;
};

struct BandParameters {
  Band band;
  int64_t first_key;
  int count;        // rows
  float bias_unit;  // 1: the landmark bias is added to the scores
};

struct Parameters {
  CUtensorMap q, out;
  CUtensorMap k[kMaxBands], v[kMaxBands];
  BandParameters band[kMaxBands];
  int bands;
  int queries, heads, group;
  int query_tiles;
  int64_t first_query;
  const int64_t* doc_start;
  const float* landmark_bias;
  float scale_log2;
  int fallback_band;  // one that has keys: read, and masked, for queries that see nothing
  float* lse;
};

// Where a row's visible keys end (or begin) in a band: the edge grows by one every `stride` rows, first at
// row `until_next`. Rows of the band's arrays; not yet clamped to those that exist.
struct Edge {
  int base;
  int until_next;
  __device__ int at(int row, int stride) const {
    if (stride == 1) return base + row;
    if (row < until_next) return base;
    return base + 1 + (stride < row ? (row - until_next) / stride : 0);
  }
};

// One band as a query tile sees it.
struct BandSpan {
  int begin, tiles;        // rows [begin, begin + 128 * tiles)
  int full_from, full_to;  // tiles of which every query sees every key
  Edge lo, hi;
  int stride, count;
};

// What a warpgroup's queries see of a key tile: perhaps keys of one half only; and in which halves not all
// queries see all keys.
enum View : int { kFirstHalf = 1, kSecondHalf = 2, kMaskFirst = 4, kMaskSecond = 8, kAllSee = 16 };

struct Item {
  int first_query;  // row of q
  int head;
  BandSpan span[kMaxBands];
};

// A key tile that not every query sees whole.
template <class S>
struct EdgeTile {
  short2 seen[S::kQueryTile];  // by each query: keys [x, y) of the tile
  int view[S::kConsumers];     // of each warpgroup
};

template <class S>
struct SharedMemory {
  alignas(1024) uint8_t q[S::kQueryStages][S::kQueryBytes];
  alignas(1024) uint8_t k[S::kKeyStages][S::kKeyBytes];
  alignas(1024) uint8_t v[S::kValueStages][S::kKeyBytes];
  Item item[S::kQueryStages];
  EdgeTile<S> edge[S::kEdgeStages];
  uint64_t q_full[S::kQueryStages], q_empty[S::kQueryStages], out_full[S::kQueryStages];
  uint64_t k_full[S::kKeyStages], k_empty[S::kKeyStages];
  uint64_t v_full[S::kValueStages], v_empty[S::kValueStages];
  uint64_t edge_full[S::kEdgeStages], edge_empty[S::kEdgeStages];
};

inline __device__ int64_t floor_divide(int64_t a, int64_t b) {  // b > 0
  const int64_t q = a / b;
  return q * b > a ? q - 1 : q;
}

inline __device__ int saturate(int64_t x) {
  return static_cast<int>(x < -kRowLimit ? -kRowLimit : x > kRowLimit ? kRowLimit : x);
}

// The edge floor((token + row) / stride) + offset.
inline __device__ Edge edge_of(int64_t token, int64_t stride, int64_t offset) {
  const int64_t base = floor_divide(token, stride);
  return {saturate(base + offset), saturate((base + 1) * stride - token)};
}

inline __device__ int clamp_row(int row, int count) {
  return row < 0 ? 0 : row > count ? count : row;
}

// First visible row for query row `row` of the tile, by the band's distances and by the row's document.
inline __device__ int row_begin(const Parameters& p, const BandSpan& span, int64_t stride, int64_t first_key,
                                int query, int row) {
  int begin = span.lo.at(row, span.stride);
  if (p.doc_start != nullptr) {
    const int64_t start = p.doc_start[query + row];
    begin = max(begin, saturate((stride == 1 ? start : (start + stride - 1) / stride) - first_key));
  }
  return clamp_row(begin, span.count);
}

inline __device__ int row_end(const BandSpan& span, int row) {
  return clamp_row(span.hi.at(row, span.stride), span.count);
}

// visible_keys() of bands.hpp for all rows of a tile at once.
inline __device__ BandSpan span_of(const Parameters& p, int band, int query, int rows) {
  const BandParameters& b = p.band[band];
  const int64_t position = p.first_query + query;
  const int64_t s = b.band.stride;
  BandSpan span;
  span.stride = static_cast<int>(s < kRowLimit ? s : kRowLimit);
  span.count = b.count;
  span.hi = edge_of(position - (b.band.near > s - 1 ? b.band.near : s - 1), s, 1 - b.first_key);
  // A finite reach; beyond the first token the edge lies before row 0 and is clamped.
  const bool unlimited = b.band.far > position + rows;
  span.lo = unlimited ? Edge{static_cast<int>(-kRowLimit), static_cast<int>(kRowLimit)}
                      : edge_of(position - b.band.far + 1, s, -b.first_key);
  span.begin = row_begin(p, span, s, b.first_key, query, 0);
  const int end = row_end(span, rows - 1);
  span.tiles = end > span.begin ? (end - span.begin + kKeyTile - 1) / kKeyTile : 0;
  span.full_from =
      (row_begin(p, span, s, b.first_key, query, rows - 1) - span.begin + kKeyTile - 1) / kKeyTile;
  span.full_to = max(row_end(span, 0) - span.begin, 0) / kKeyTile;
  return span;
}

// A value that is equal in all threads of a warp, so that the compiler knows it, too.
inline __device__ int uniform(int x) {
  return __shfl_sync(0xffffffff, x, 0);
}

// Steps through the key tiles of an item: bands in order, each from its last tile to its first, so that a
// query meets its nearest keys first. For whole warps.
struct Cursor {
  int band;
  int tile;

  __device__ void start(const Parameters& p, const Item& item) {
    band = -1;
    tile = 0;
    next(p, item);
  }
  /// False when there is no further tile.
  __device__ bool next(const Parameters& p, const Item& item) {
    if (--tile >= 0) return true;
    while (++band < p.bands) {
      tile = uniform(item.span[band].tiles) - 1;
      if (tile >= 0) return true;
    }
    return false;
  }
  /// Whether some key of the tile is not seen by some query.
  __device__ bool edge(const Item& item) const {
    const BandSpan& span = item.span[band];
    return uniform(tile < span.full_from || tile >= span.full_to);
  }
  /// How many of the tiles that follow in this band are no edges.
  __device__ int full_tiles_ahead(const Item& item) const {
    const BandSpan& span = item.span[band];
    return uniform(tile > span.full_to ? 0 : max(tile - span.full_from, 0));
  }
};

// The items of a block: (query tile, head), those with most landmarks first; heads beside each other at the
// same time, so that the keys of a KV head are read from memory once. The blocks of a cluster take
// neighbouring heads.
struct Items {
  int index, step, count;
  __device__ explicit Items(const Parameters& p)
      : index(static_cast<int>(blockIdx.x)),
        step(static_cast<int>(gridDim.x)),
        count(p.query_tiles * p.heads) {}
  __device__ bool any() const { return index < count; }
  __device__ void next() { index += step; }
};

}  // namespace longhalo::hopper_attention

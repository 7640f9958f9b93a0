// What a block of the Hopper kernel of attention's gradient works on: items (key tile, KV head, perhaps one
// block of the queries that see it), the query tiles that an item steps through, and the shared memory
// through which they flow.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/attention/band_rows.cuh"
#include "kernels/attention/hopper_backward_plan.hpp"
#include "kernels/attention/hopper_tiles.cuh"

namespace longhalo::hopper_backward {

using hopper_attention::Ring;
using hopper_attention::uniform;

inline constexpr int kWarpgroup = 128;
inline constexpr int kThreads = kWarpgroup * (kConsumers + 1);
inline constexpr int kProducerRegisters = 24;
inline constexpr int kConsumerRegisters = 240;
inline constexpr int64_t kRowLimit = int64_t{1} << 30;

template <int kDim_>
struct Shape {
  static constexpr int kDim = kDim_;
  static constexpr int kQueryStages = 3;
  static constexpr int kOutStages = 2;  // of d_out: it is wanted later
  static constexpr int kBuffers = 3;    // of gradients of scores
  static constexpr int kKeyBytes = kKeyTile * kDim * 2;
  static constexpr int kQueryBytes = kQueryTile * kDim * 2;
  static constexpr int kScoreBytes = kKeyTile * kQueryTile * 2;
};

// A band and where the gradients of its keys go.
struct BandPart {
  BandRows rows;
  CUtensorMap k, v;
  int tiles;
  int whole, whole_end;  // tiles all of whose queries are there, but for documents; of a band with an end
  bool sliced;           // an item is one block of the queries
  int first_bias;        // row of the bias partials of its first (tile, slice); -1: no bias
  float* dk;             // added into; of a sliced band the sums of block 0, overwritten, and added up later
  float* dv;             //
  int64_t row_stride;    // floats
  int64_t block_stride;  // floats; of a sliced band
  __host__ __device__ int whole_tiles() const { return whole_end - whole; }
};

struct Parameters {
  CUtensorMap q, d_out;
  BandPart band[kMaxBands];
  int bands, unsliced_bands;  // unsliced ones first
  int whole_tiles;            // of all unsliced bands, a KV head
  int round_items, unsliced_items, items;
  int blocks, block_tiles;  // of the queries, for sliced bands
  int queries, padded_queries, query_tiles, heads, kv_heads, group;
  int64_t first_query;
  const int64_t* doc_start;
  const float* lse_log2;  // [H, padded_queries]
  const float* delta;     // [H, padded_queries]
  const float* landmark_bias;
  float scale, scale_log2;
  float* dq;         // sums, in the order of registers: [query tile, H, warpgroup, d / 16, thread, 4]
  float* bias;       // partials [.., H]
  unsigned* dealt;   // items that are not of rounds; starts at 0
  unsigned* rounds;  // begun, by all blocks together; starts at 0
};

struct Item {
  int band, tile, kv_head, block;
};

inline __host__ __device__ int64_t nearest_of(const Band& band) {
  return band.near > band.stride - 1 ? band.near : band.stride - 1;
}

// How many tiles of a band without an end are seen by some query of a block or of those before it.
inline __host__ __device__ int tiles_begun(const Parameters& p, const BandPart& part, int block) {
  const Band& band = part.rows.band;
  const int64_t last_row = static_cast<int64_t>(block + 1) * p.block_tiles * kQueryTile - 1;
  const int64_t row = last_row < p.queries ? last_row : p.queries - 1;
  const int64_t newest = p.first_query + row - nearest_of(band) - part.rows.first_key * band.stride;
  if (newest < 0) return 0;
  const int64_t tiles = newest / (band.stride * kKeyTile) + 1;
  return tiles < part.tiles ? static_cast<int>(tiles) : part.tiles;
}

// The items of a block of threads, found by one warp. First rounds of items that are equally long (but for
// documents), the whole tiles of unsliced bands: key tiles beside each other at the same time, one KV head
// after the other, for they step through the same queries, which then come from L2, and so do the sums of dq.
// All other items are dealt to blocks as these become free: the other unsliced tiles, long ones first on
// either side of a band's whole ones, and then sliced bands, with all key tiles of a block of queries beside
// each other.
struct Items {
  int index;
  Item item;
  __device__ Items(const Parameters& p, int lane)
      : index(static_cast<int>(blockIdx.x)), first_of_block_(p.unsliced_items) {
    item.block = 0;
    find(p, lane);
  }
  __device__ bool any(const Parameters& p) const { return index < p.items; }
  __device__ bool in_rounds(const Parameters& p) const { return index < p.round_items; }
  __device__ void next(const Parameters& p, int lane) {
    index += static_cast<int>(gridDim.x);
    find(p, lane);
  }
  __device__ unsigned round() const { return static_cast<unsigned>(index) / gridDim.x; }

 private:
  int first_of_block_;

  __device__ void find(const Parameters& p, int lane) {
    if (!in_rounds(p)) {
      if (lane == 0) index = p.round_items + static_cast<int>(atomicAdd(p.dealt, 1));
      index = __shfl_sync(0xffffffff, index, 0);
    }
    if (!any(p)) return;
    item.band = 0;
    if (in_rounds(p)) {
      item.kv_head = index / p.whole_tiles;
      item.tile = index - item.kv_head * p.whole_tiles;
      for (int tiles; item.tile >= (tiles = p.band[item.band].whole_tiles()); ++item.band)
        item.tile -= tiles;
      item.tile += p.band[item.band].whole;
    } else if (index < p.unsliced_items) {
      item.tile = (index - p.round_items) / p.kv_heads;
      item.kv_head = index - p.round_items - item.tile * p.kv_heads;
      for (int tiles; item.tile >= (tiles = p.band[item.band].tiles - p.band[item.band].whole_tiles());
           ++item.band)
        item.tile -= tiles;
      const BandPart& part = p.band[item.band];
      const int behind = part.tiles - part.whole_end;
      item.tile = item.tile < behind ? part.whole_end + item.tile : part.whole - 1 - (item.tile - behind);
    } else {
      find_sliced(p);
    }
  }

  __device__ void find_sliced(const Parameters& p) {
    while (true) {
      int tiles = 0;
      for (int band = p.unsliced_bands; band < p.bands; ++band)
        tiles += tiles_begun(p, p.band[band], item.block);
      const int local = index - first_of_block_;
      if (local < tiles * p.kv_heads) {
        item.kv_head = local / tiles;
        item.tile = local - item.kv_head * tiles;
        break;
      }
      first_of_block_ += tiles * p.kv_heads;
      ++item.block;
    }
    item.band = p.unsliced_bands;
    for (int tiles; item.tile >= (tiles = tiles_begun(p, p.band[item.band], item.block)); ++item.band)
      item.tile -= tiles;
  }
};

// Keeps the blocks together: each begins a round of items when nearly all do, so that what one has brought
// into L2 is still there for the others. Nothing depends on it but speed, so it does not wait for long, nor
// ever again when that was in vain: some blocks may not be running.
struct Pace {
  unsigned begun = 0;
  bool keeps = true;

  __device__ void begin_round(const Parameters& p, unsigned round) {
    constexpr int kPatience = 2000;
    atomicAdd(p.rounds, round + 1 - begun);
    begun = round + 1;
    const unsigned all = begun * gridDim.x, late = gridDim.x / 16;
    const volatile unsigned* const now = p.rounds;
    for (int i = 0; keeps && *now + late < all; ++i) {
      if (i == kPatience) keeps = false;
      __nanosleep(20);
    }
  }
  // Nobody waits for a block that has no more items of rounds.
  __device__ void end(const Parameters& p) {
    const unsigned rounds = (static_cast<unsigned>(p.round_items) + gridDim.x - 1) / gridDim.x;
    if (begun == rounds) return;
    atomicAdd(p.rounds, rounds - begun);
    begun = rounds;
  }
};

inline __device__ int clamp_to(int64_t row, int end) {
  return static_cast<int>(row < 0 ? 0 : row > end ? end : row);
}

// The rows from `begin` on, up to `end`, whose document begins at `token` or before it: they come before all
// others.
inline __device__ int rows_of_documents(const Parameters& p, int begin, int end, int64_t token) {
  if (p.doc_start == nullptr) return end;
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (p.doc_start[middle] <= token)
      begin = middle + 1;
    else
      end = middle;
  }
  return end;
}

inline constexpr int kEdge = 1;      // some key of the tile is not seen by some query
inline constexpr int kHeadDone = 2;  // the last step of a head
inline constexpr int kItemDone = 4;  // the last step of an item
inline constexpr int kNoMore = 8;    // no step, and none after it
inline constexpr int kNoBand = -1;   // no item, and none after it

// The way of an item through the queries.
struct Course {
  int head, last_head;
  int begin, end;                   // query tiles
  int tile, left;                   // the next one, and how many are left of this head
  int full_begin, full_end;         // rows of q that see every key
  int first_key;                    // of the item, as a row of the band's arrays
  hopper_attention::Edge from, to;  // rows of the band's arrays that are seen, by row of q
  int stride, count;
  int band;
  bool nothing;  // one step in which nobody sees anything

  // On to the next tile; the flags of the step that this one is.
  __device__ int next() {
    if (++tile == end) tile = begin;
    if (--left > 0) return 0;
    left = end - begin;
    return ++head > last_head ? kHeadDone | kItemDone : kHeadDone;
  }

  // Of the item's keys the first that a row of q sees, and how many.
  __device__ short2 seen(const Parameters& p, int row) const {
    if (nothing) return {0, 0};
    const int to_row = hopper_attention::clamp_row(to.at(row, stride), count);
    int from_row = from.at(row, stride);
    if (p.doc_start != nullptr)
      from_row = max(from_row, hopper_attention::saturate(divide(p.doc_start[row] + stride - 1, stride) -
                                                          p.band[band].rows.first_key));
    const int first = min(max(from_row - first_key, 0), kKeyTile);
    const int end = min(max(to_row - first_key, first), kKeyTile);
    return {static_cast<short>(first), static_cast<short>(end - first)};
  }
};

inline __device__ Course course_of(const Parameters& p, const Item& item) {
  const BandPart& part = p.band[item.band];
  const Band& band = part.rows.band;
  const int64_t s = band.stride, nearest = nearest_of(band);
  const bool unlimited = band.far >= p.first_query + p.queries;
  Course c;
  c.band = item.band;
  c.head = item.kv_head * p.group, c.last_head = c.head + p.group - 1;
  c.first_key = item.tile * kKeyTile;
  c.stride = hopper_attention::saturate(s), c.count = part.rows.count;
  c.to = hopper_attention::edge_of(p.first_query - nearest, s, 1 - part.rows.first_key);
  c.from = unlimited ? hopper_attention::Edge{-static_cast<int>(kRowLimit), static_cast<int>(kRowLimit)}
                     : hopper_attention::edge_of(p.first_query - band.far + 1, s, -part.rows.first_key);

  // Rows that see some key, and rows that see every key.
  const int64_t first = part.rows.first_key + c.first_key;
  const bool whole = c.first_key + kKeyTile <= c.count;
  const int64_t last = whole ? first + kKeyTile - 1 : part.rows.first_key + c.count - 1;
  const int begin = clamp_to(first * s + nearest - p.first_query, p.queries);
  c.full_begin = whole ? clamp_to(last * s + nearest - p.first_query, p.queries) : p.queries;
  int end = c.full_end = p.queries;
  if (!unlimited) {
    // Key g is out of reach from query far + (g + 1) * s - 1 on.
    end = clamp_to(band.far + (last + 1) * s - 1 - p.first_query, p.queries);
    c.full_end = clamp_to(band.far + (first + 1) * s - 1 - p.first_query, p.queries);
  }
  end = rows_of_documents(p, begin, end, last * s);
  c.full_end = rows_of_documents(p, c.full_begin, c.full_end, first * s);

  c.begin = begin / kQueryTile, c.end = begin < end ? (end - 1) / kQueryTile + 1 : c.begin;
  if (part.sliced) {
    c.begin = max(c.begin, item.block * p.block_tiles);
    c.end = min(c.end, (item.block + 1) * p.block_tiles);
  }
  c.nothing = c.begin >= c.end;
  if (c.nothing) c.head = c.last_head, c.begin = 0, c.end = 1, c.full_end = 0;
  // Items that share queries meet the same tile at the same time, wherever their own tiles begin.
  c.left = c.end - c.begin;
  c.tile = c.begin + (c.left - c.begin % c.left) % c.left;
  return c;
}

struct alignas(16) Step {
  int flags, query_tile, head, unused;
};

struct Place {
  int query_tile, head;
};

template <class S>
struct SharedMemory {
  alignas(1024) uint8_t k[S::kKeyBytes];
  alignas(1024) uint8_t v[S::kKeyBytes];
  alignas(1024) uint8_t q[S::kQueryStages][S::kQueryBytes];
  alignas(1024) uint8_t d_out[S::kOutStages][S::kQueryBytes];
  alignas(1024) uint8_t d_scores[S::kBuffers][S::kScoreBytes];  // [128 keys, 64 queries]
  alignas(128) float dq[kConsumerWarps][kQueryTile * S::kDim / kConsumerWarps];
  alignas(16) float lse_log2[S::kQueryStages][kQueryTile];
  alignas(16) float delta[S::kQueryStages][kQueryTile];
  alignas(16) short2 seen[S::kQueryStages][kQueryTile];  // the first key, and how many; only at an edge
  // Apart by what is told of a race: 16 bytes.
  alignas(16) Step step[S::kQueryStages];
  alignas(16) Course course;  // of the warp that loads queries
  alignas(16) Item dealt;     // the latest item
  alignas(16) Item item;      // whose keys are here
  alignas(16) uint64_t dealt_full, dealt_empty, keys_full, keys_empty;
  uint64_t q_full[S::kQueryStages], q_empty[S::kQueryStages];
  uint64_t out_full[S::kOutStages], out_empty[S::kOutStages];
  uint64_t scored[S::kBuffers];  // a buffer is written, and the one before is read
};

}  // namespace longhalo::hopper_backward

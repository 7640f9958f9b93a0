// Attention over bands for Hopper (sm_90a): one persistent block a multiprocessor works through (query tile,
// head) items. docs/performance.md says what each choice is worth.
//
// A block has three roles. Warp 0 of the first warpgroup loads queries and keys by TMA, warp 1 values, into
// rings of shared-memory stages. Each consumer warpgroup owns 64 queries: S = Q K^T and O += P V by wgmma, P
// in registers. The product S of one key tile runs while the softmax of the one before is still to be
// multiplied with V, and the warpgroups take turns at the tensor cores, so that one computes exponentials
// while another multiplies. This goes on across items: the next item's first product is started before the
// last one's output is written.
//
// Of each band only the key tiles that some query of the tile sees are visited; a tile is masked only when
// some of its keys are not seen by some query. Scores are in units of log2. The maximum that they are taken
// relative to is allowed to lag by 2^8: O is rescaled only when a row's maximum grows by more.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/device.hpp"
#include "kernels/attention/attention_cuda.hpp"
#include "kernels/common/hopper.cuh"
#include "kernels/common/tensor_map.hpp"

// Compiled for other architectures too, where the kernel's body is empty and what it uses is not used.
#pragma nv_diag_suppress 177

namespace longhalo {
namespace {

constexpr int kKeyTile = 128;
constexpr int kWarpgroup = 128;
constexpr float kLag = 8;  // how far, in log2, a row's scores may exceed the maximum they are relative to
constexpr int64_t kRowLimit = int64_t{1} << 30;

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
  CUtensorMap q;
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
  __nv_bfloat16* out;
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

struct Item {
  int first_query;  // row of q
  int head;
  BandSpan span[kMaxBands];
};

template <class S>
struct SharedMemory {
  alignas(1024) uint8_t q[S::kQueryStages][S::kQueryBytes];
  alignas(1024) uint8_t k[S::kKeyStages][S::kKeyBytes];
  alignas(1024) uint8_t v[S::kValueStages][S::kKeyBytes];
  Item item[S::kQueryStages];
  uint64_t q_full[S::kQueryStages], q_empty[S::kQueryStages];
  uint64_t k_full[S::kKeyStages], k_empty[S::kKeyStages];
  uint64_t v_full[S::kValueStages], v_empty[S::kValueStages];
};

// A place in a ring of stages, and the parity of the phase that it is in.
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  template <int kStages>
  __device__ void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ int64_t floor_divide(int64_t a, int64_t b) {  // b > 0
  const int64_t q = a / b;
  return q * b > a ? q - 1 : q;
}

__device__ int saturate(int64_t x) {
  return static_cast<int>(x < -kRowLimit ? -kRowLimit : x > kRowLimit ? kRowLimit : x);
}

// The edge floor((token + row) / stride) + offset.
__device__ Edge edge_of(int64_t token, int64_t stride, int64_t offset) {
  const int64_t base = floor_divide(token, stride);
  return {saturate(base + offset), saturate((base + 1) * stride - token)};
}

__device__ int clamp_row(int row, int count) {
  return row < 0 ? 0 : row > count ? count : row;
}

// First visible row for query row `row` of the tile, by the band's distances and by the row's document.
__device__ int row_begin(const Parameters& p, const BandSpan& span, int64_t stride, int64_t first_key,
                         int query, int row) {
  int begin = span.lo.at(row, span.stride);
  if (p.doc_start != nullptr) {
    const int64_t start = p.doc_start[query + row];
    begin = max(begin, saturate((start + stride - 1) / stride - first_key));
  }
  return clamp_row(begin, span.count);
}

__device__ int row_end(const BandSpan& span, int row) {
  return clamp_row(span.hi.at(row, span.stride), span.count);
}

// visible_keys() of bands.hpp for all rows of a tile at once.
__device__ BandSpan span_of(const Parameters& p, int band, int query, int rows) {
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
__device__ int uniform(int x) {
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

// Loads 128 rows of keys or values of one head. In a cluster each block fetches its share of the rows for
// all.
template <class S>
__device__ void load_tile(uint8_t* to, const CUtensorMap* map, int head, int row, uint64_t* barrier,
                          int block) {
  hopper::mbarrier_arrive_expect(barrier, S::kKeyBytes);
  constexpr int kRows = kKeyTile / S::kCluster;
  const int first = block * kRows;
#pragma unroll
  for (int part = 0; part < S::kDim / 64; ++part) {
    uint8_t* box = to + part * kKeyTile * 128 + first * 128;
    if constexpr (S::kCluster == 1)
      hopper::tma_load(box, map, part * 64, head, row, barrier);
    else
      hopper::tma_load_multicast(box, map, part * 64, head, row + first, barrier, (1 << S::kCluster) - 1);
  }
}

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

// Warp 0: works out what each item sees, and loads its queries and keys.
template <class S>
__device__ void produce_keys(const Parameters& p, SharedMemory<S>& shared, int lane, int block) {
  Ring q, k;
  for (Items items(p); items.any(); items.next()) {
    Item& item = shared.item[q.stage];
    hopper::mbarrier_wait(&shared.q_empty[q.stage], q.phase ^ 1);
    const int first_query = (p.query_tiles - 1 - items.index / p.heads) * S::kQueryTile;
    const int head = items.index % p.heads;
    if (lane == 0) item.first_query = first_query, item.head = head;
    if (lane < p.bands)
      item.span[lane] = span_of(p, lane, first_query, min(S::kQueryTile, p.queries - first_query));
    __syncwarp();
    if (lane == 0) {
      bool nothing = true;
      for (int band = 0; band < p.bands; ++band)
        nothing = nothing && item.span[band].tiles == 0;
      if (nothing) {
        BandSpan& span = item.span[p.fallback_band];
        span.tiles = 1, span.begin = 0, span.full_to = 0;
      }
      hopper::mbarrier_arrive_expect(&shared.q_full[q.stage], S::kQueryBytes);
#pragma unroll
      for (int part = 0; part < S::kDim / 64; ++part)
        hopper::tma_load(shared.q[q.stage] + part * S::kQueryTile * 128, &p.q, part * 64, head, first_query,
                         &shared.q_full[q.stage]);
    }
    __syncwarp();
    Cursor at;
    at.start(p, item);
    do {
      hopper::mbarrier_wait(&shared.k_empty[k.stage], k.phase ^ 1);
      if (lane == 0)
        load_tile<S>(shared.k[k.stage], &p.k[at.band], head / p.group,
                     item.span[at.band].begin + at.tile * kKeyTile, &shared.k_full[k.stage], block);
      __syncwarp();
      k.next<S::kKeyStages>();
    } while (at.next(p, item));
    q.next<S::kQueryStages>();
  }
}

// Warp 1: loads the values of the same tiles.
template <class S>
__device__ void produce_values(const Parameters& p, SharedMemory<S>& shared, int lane, int block) {
  Ring q, v;
  for (Items items(p); items.any(); items.next()) {
    const Item& item = shared.item[q.stage];
    hopper::mbarrier_wait(&shared.q_full[q.stage], q.phase);
    Cursor at;
    at.start(p, item);
    do {
      hopper::mbarrier_wait(&shared.v_empty[v.stage], v.phase ^ 1);
      if (lane == 0)
        load_tile<S>(shared.v[v.stage], &p.v[at.band], item.head / p.group,
                     item.span[at.band].begin + at.tile * kKeyTile, &shared.v_full[v.stage], block);
      __syncwarp();
      v.next<S::kValueStages>();
    } while (at.next(p, item));
    if (lane == 0) hopper::mbarrier_arrive(&shared.q_empty[q.stage]);
    q.next<S::kQueryStages>();
  }
}

// The running softmax of one thread's two rows, `rows[0]` and `rows[1]` = rows[0] + 8 of the warpgroup's 64.
struct Softmax {
  float top[2];  // what exponents are relative to, in log2; equal in the four threads of a row
  float sum[2];  // of this thread's columns
  __device__ void reset() {
    top[0] = top[1] = -INFINITY;
    sum[0] = sum[1] = 0;
  }
  /// Whether every row of this warp has seen a key.
  __device__ bool anchored() const {
    return __all_sync(0xffffffff, top[0] > -INFINITY && top[1] > -INFINITY);
  }
};

__device__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Scores to weights in place, relative to the maxima that every row knows from earlier tiles: nearly always
// these will do, and looking for a maximum takes a quarter of the time of a softmax. False, with nothing but
// `s` changed, when a weight became so large that they would not.
__device__ bool soften_quickly(float (&s)[64], Softmax& softmax, float scale, float bias) {
  float total[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float offset = bias - softmax.top[half];
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[4 * i + 2 * half + c];
        const float exponent = fmaf(x, scale, offset);
        x = exp2_fast(exponent);
        sum[c] += x;
      }
    }
    total[half] = sum[0] + sum[1];
  }
  constexpr float kLargest = 0x1p64F;
  const bool good = total[0] < kLargest && total[1] < kLargest;
  if (!__all_sync(0xffffffff, good)) return false;
  softmax.sum[0] += total[0];
  softmax.sum[1] += total[1];
  return true;
}

// Scores to weights in place, in the general case: finds the rows' maxima first. `rescale` gets what earlier
// sums and outputs must be multiplied with; returns whether that is needed by any row of this warp.
__device__ bool soften(float (&s)[64], Softmax& softmax, float scale, float bias, float (&rescale)[2]) {
  bool grown = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      most[i] = s[4 * i + 2 * half];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i >= 4) most[i % 4] = fmaxf(most[i % 4], s[4 * i + 2 * half]);
      most[i % 4] = fmaxf(most[i % 4], s[4 * i + 2 * half + 1]);
    }
    float top = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
    top = fmaf(top, scale, bias);
    rescale[half] = 1;
    if (top > softmax.top[half] + kLag) {
      rescale[half] = exp2_fast(softmax.top[half] - top);
      softmax.top[half] = top;
      grown = true;
    }
    const float offset = bias - (softmax.top[half] == -INFINITY ? 0.0F : softmax.top[half]);
    float sum[4] = {softmax.sum[half] * rescale[half], 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[4 * i + 2 * half + c];
        x = exp2_fast(fmaf(x, scale, offset));
        sum[(2 * i + c) % 4] += x;
      }
    }
    softmax.sum[half] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
  return __any_sync(0xffffffff, grown);
}

__device__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Byte offset of 16-byte piece `piece` of a row of 128 bytes, as TMA's 128-byte swizzle lays it.
__device__ int swizzled(int row, int piece) {
  return row * 128 + ((piece ^ row) % 8) * 16;
}

// Four 8 x 8 matrices of bf16; lanes 8 i .. 8 i + 7 give the rows of matrix i.
__device__ void load_matrix(uint32_t (&x)[4], const uint8_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(hopper::shared_address(row))
               : "memory");
}

// d[16, 8] += a[16, 16] b[16, 8] by one warp.
__device__ void multiply_add(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One consumer warpgroup: what it computes and where it is in the rings.
template <class S>
struct Consumer {
  static constexpr int kDim = S::kDim;
  const Parameters& p;
  SharedMemory<S>& shared;
  const int warpgroup;  // 0 to kConsumers - 1
  const int warp, lane;
  float o[kDim / 2];
  uint32_t weights[32];
  Ring q, k, v;

  __device__ Consumer(const Parameters& parameters, SharedMemory<S>& memory, int group, int thread)
      : p(parameters),
        shared(memory),
        warpgroup(uniform(group)),
        warp(uniform(thread / 32)),
        lane(thread % 32) {}

  __device__ int row() const { return 64 * warpgroup + 16 * warp + lane / 4; }  // and row() + 8

  __device__ void release(uint64_t* barrier) const {
    if (lane == 0) hopper::mbarrier_arrive(barrier);
  }
  // A stage of keys or values is refilled for the whole cluster at once: each block hears of every reader.
  __device__ void release_tile(uint64_t* barrier) const {
    if constexpr (S::kCluster == 1)
      release(barrier);
    else if (lane < S::kCluster)
      hopper::mbarrier_arrive_at(barrier, lane);
  }

  __device__ void multiply_keys(float (&s)[64]) {
    const uint64_t a = hopper::wgmma_operand(shared.q[q.stage] + warpgroup * 64 * 128, 0);
    const uint64_t b = hopper::wgmma_operand(shared.k[k.stage], 0);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
      hopper::wgmma_ss(s, hopper::wgmma_advance(a, i / 4 * S::kQueryTile * 128 + i % 4 * 32),
                       hopper::wgmma_advance(b, i / 4 * kKeyTile * 128 + i % 4 * 32), i > 0);
  }

  // The same scores of this warp's 16 rows alone, without the other warps.
  __device__ void multiply_keys_again(float (&s)[64]) const {
#pragma unroll
    for (int i = 0; i < 64; ++i)
      s[i] = 0;
    const int q_row = 64 * warpgroup + 16 * warp + lane % 16;
    const int k_row = lane % 8 + lane / 16 * 8;
#pragma unroll 1
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t a[4];
      load_matrix(a,
                  shared.q[q.stage] + i / 4 * S::kQueryTile * 128 + swizzled(q_row, i % 4 * 2 + lane / 16));
      const uint8_t* keys = shared.k[k.stage] + i / 4 * kKeyTile * 128;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        uint32_t b[4];
        load_matrix(b, keys + swizzled(16 * j + k_row, i % 4 * 2 + lane / 8 % 2));
        multiply_add(&s[8 * j], a, b[0], b[1]);
        multiply_add(&s[8 * j + 4], a, b[2], b[3]);
      }
    }
  }

  __device__ void multiply_values(bool first) {
    const uint64_t b = hopper::wgmma_operand(shared.v[v.stage], kKeyTile * 128);
#pragma unroll
    for (int i = 0; i < kKeyTile / 16; ++i) {
      const uint32_t a[4] = {weights[4 * i], weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3]};
      hopper::wgmma_rs(o, a, hopper::wgmma_advance(b, i * 16 * 128), i > 0 || !first);
    }
  }

  // The keys that this thread's two rows see of a tile, as columns of the tile.
  struct Columns {
    int begin[2], end[2];
  };
  __device__ Columns columns(const Item& item, const Cursor& at) const {
    const BandSpan& span = item.span[at.band];
    const BandParameters& b = p.band[at.band];
    const int first = span.begin + at.tile * kKeyTile;
    Columns seen;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = min(row() + 8 * half, p.queries - 1 - item.first_query);
      seen.begin[half] = row_begin(p, span, b.band.stride, b.first_key, item.first_query, own) - first;
      seen.end[half] = row_end(span, own) - first;
    }
    return seen;
  }

  // Scores of keys that a row does not see become -infinity.
  __device__ void mask(float (&s)[64], const Columns& seen) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int base = 2 * (lane % 4) - seen.begin[half];
      const unsigned count = max(seen.end[half] - seen.begin[half], 0);
#pragma unroll
      for (int i = 0; i < 16; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (static_cast<unsigned>(base + 8 * i + c) >= count) s[4 * i + 2 * half + c] = -INFINITY;
    }
  }

  __device__ void pack_weights(const float (&s)[64]) {
#pragma unroll
    for (int i = 0; i < 32; ++i)
      weights[i] = pack(s[2 * i], s[2 * i + 1]);
  }

  __device__ void write(const Softmax& softmax, int first_query, int head) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = softmax.sum[half];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const int query = first_query + row() + 8 * half;
      if (query >= p.queries) continue;
      const float factor = sum > 0 ? __fdividef(1.0F, sum) : 0;
      __nv_bfloat16* out = p.out + (static_cast<int64_t>(query) * p.heads + head) * kDim + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i)
        *reinterpret_cast<uint32_t*>(out + 8 * i) =
            pack(o[4 * i + 2 * half] * factor, o[4 * i + 2 * half + 1] * factor);
      if (p.lse != nullptr && lane % 4 == 0)
        p.lse[static_cast<int64_t>(head) * p.queries + query] =
            sum > 0 ? (softmax.top[half] + log2f(sum)) * std::numbers::ln2_v<float> : -INFINITY;
    }
  }

  __device__ float bias_of(int head) const {
    return p.landmark_bias == nullptr ? 0 : p.landmark_bias[head] * std::numbers::log2e_v<float>;
  }

  // The warpgroups take turns at issuing products: 1 + w is the barrier that opens warpgroup w's turn.
  __device__ void wait_for_turn() {
    hopper::named_barrier_wait(1 + warpgroup, 2 * kWarpgroup);
  }
  __device__ void end_turn() {
    hopper::named_barrier_arrive(1 + (warpgroup + 1) % S::kConsumers, 2 * kWarpgroup);
  }

  // In this warpgroup's turn, starts S = Q K^T of a tile and O += P V of the tile before it.
  __device__ void start_products(float (&s)[64], bool first_of_item) {
    hopper::mbarrier_wait(&shared.v_full[v.stage], v.phase);
    hopper::mbarrier_wait(&shared.k_full[k.stage], k.phase);
    wait_for_turn();
    hopper::wgmma_own(s);
    hopper::wgmma_own(o);
    hopper::wgmma_fence();
    multiply_keys(s);
    hopper::wgmma_commit();
    multiply_values(first_of_item);
    hopper::wgmma_commit();
    end_turn();
  }

  __device__ void wait_for_scores(float (&s)[64]) {
    hopper::wgmma_wait<1>();
    hopper::wgmma_own(s);
  }

  __device__ void keys_done() {
    release_tile(&shared.k_empty[k.stage]);
    k.template next<S::kKeyStages>();
  }

  __device__ void wait_for_output() {
    hopper::wgmma_wait<0>();
    hopper::wgmma_own(o);
    release_tile(&shared.v_empty[v.stage]);
    v.template next<S::kValueStages>();
  }

  __device__ void rescale_output(const float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i)
      o[i] *= rescale[i / 2 % 2];
  }

  __device__ void run() {
    if (warpgroup == S::kConsumers - 1) end_turn();  // opens the first turn of warpgroup 0

    // The first product has no other to run beside.
    Items items(p);
    Cursor at;
    Softmax softmax;
    softmax.reset();
    float s[64];
    float rescale[2];
    hopper::mbarrier_wait(&shared.q_full[q.stage], q.phase);
    const Item* item = &shared.item[q.stage];
    at.start(p, *item);
    hopper::mbarrier_wait(&shared.k_full[k.stage], k.phase);
    hopper::wgmma_own(s);
    hopper::wgmma_fence();
    multiply_keys(s);
    hopper::wgmma_commit();
    hopper::wgmma_wait<0>();
    hopper::wgmma_own(s);
    int first_query = uniform(item->first_query), head = uniform(item->head);
    float bias = bias_of(head);
    if (at.edge(*item)) mask(s, columns(*item, at));
    soften(s, softmax, p.scale_log2, bias * p.band[at.band].bias_unit, rescale);
    keys_done();
    pack_weights(s);
    bool first_of_item = true;  // of the weights that are yet to be multiplied with V

    while (true) {
      // Tiles that every query sees, as long as they come.
      int tiles = uniform(softmax.anchored() ? at.full_tiles_ahead(*item) : 0);
      const float band_bias = bias * p.band[at.band].bias_unit;
      at.tile -= tiles;
      for (; tiles > 0; --tiles) {
        start_products(s, first_of_item);
        wait_for_scores(s);
        first_of_item = false;
        bool grown = false;
        if (!soften_quickly(s, softmax, p.scale_log2, band_bias)) {
          multiply_keys_again(s);
          grown = soften(s, softmax, p.scale_log2, band_bias, rescale);
        }
        keys_done();
        wait_for_output();
        if (grown) rescale_output(rescale);
        pack_weights(s);
      }

      // One tile of any kind, perhaps of the next item.
      const bool fresh = !at.next(p, *item);
      if (fresh) {
        release(&shared.q_empty[q.stage]);
        q.template next<S::kQueryStages>();
        items.next();
        if (!items.any()) break;
        hopper::mbarrier_wait(&shared.q_full[q.stage], q.phase);
        item = &shared.item[q.stage];
        at.start(p, *item);
        bias = bias_of(item->head);
      }
      start_products(s, first_of_item);
      first_of_item = fresh;
      const bool edge = at.edge(*item);
      Columns seen{};
      if (edge) seen = columns(*item, at);
      const float tile_bias = bias * p.band[at.band].bias_unit;
      const Softmax before = softmax;
      if (fresh) softmax.reset();
      const bool anchored = softmax.anchored();
      wait_for_scores(s);
      if (edge) mask(s, seen);
      bool grown = false;
      if (!anchored || !soften_quickly(s, softmax, p.scale_log2, tile_bias)) {
        if (anchored) {
          multiply_keys_again(s);
          if (edge) mask(s, seen);
        }
        grown = soften(s, softmax, p.scale_log2, tile_bias, rescale);
      }
      keys_done();
      wait_for_output();
      if (fresh) {
        write(before, first_query, head);
        first_query = uniform(item->first_query), head = uniform(item->head);
      } else if (grown) {
        rescale_output(rescale);
      }
      pack_weights(s);
    }

    // The last output has no other product to run beside.
    hopper::mbarrier_wait(&shared.v_full[v.stage], v.phase);
    wait_for_turn();
    hopper::wgmma_own(o);
    hopper::wgmma_fence();
    multiply_values(first_of_item);
    hopper::wgmma_commit();
    if (warpgroup < S::kConsumers - 1) end_turn();  // the last turn opens no other
    wait_for_output();
    write(softmax, first_query, head);
  }
};

#endif  // sm_90a

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) hopper_kernel(const __grid_constant__ Parameters p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw[];
  // NOTE: the same offset in every block of a cluster, because dynamic shared memory begins at the same
  // address.
  auto& shared = *reinterpret_cast<SharedMemory<S>*>((reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  constexpr int kConsumerWarps = 4 * S::kConsumers;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kQueryStages; ++i) {
      hopper::mbarrier_init(&shared.q_full[i], 1);
      hopper::mbarrier_init(&shared.q_empty[i], kConsumerWarps + 1);  // and the warp that loads values
    }
    for (int i = 0; i < S::kKeyStages; ++i) {
      hopper::mbarrier_init(&shared.k_full[i], 1);
      hopper::mbarrier_init(&shared.k_empty[i], kConsumerWarps * S::kCluster);
    }
    for (int i = 0; i < S::kValueStages; ++i) {
      hopper::mbarrier_init(&shared.v_full[i], 1);
      hopper::mbarrier_init(&shared.v_empty[i], kConsumerWarps * S::kCluster);
    }
    hopper::mbarrier_init_fence();
  }
  if constexpr (S::kCluster > 1) hopper::cluster_sync();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    hopper::give_up_registers<S::kProducerRegisters>();
    const int block = S::kCluster > 1 ? hopper::cluster_block() : 0;
    if (threadIdx.x < 32)
      produce_keys<S>(p, shared, static_cast<int>(threadIdx.x), block);
    else if (threadIdx.x < 64)
      produce_values<S>(p, shared, static_cast<int>(threadIdx.x) - 32, block);
  } else {
    hopper::take_registers<S::kConsumerRegisters>();
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
    Consumer<S>(p, shared, thread / kWarpgroup, thread % kWarpgroup).run();
  }
  // No block leaves while another may still write to its shared memory.
  __syncthreads();
  if constexpr (S::kCluster > 1) hopper::cluster_sync();
#endif
}

template <class S>
void launch(StreamHandle stream, const Attention<BFloat16>& a) {
  constexpr int kDim = S::kDim;
  check(a.queries < kRowLimit, "the queries of one launch fit 30 bits");
  Parameters p;
  p.bands = static_cast<int>(a.bands.size());
  p.queries = static_cast<int>(a.queries);
  p.heads = static_cast<int>(a.heads);
  p.group = static_cast<int>(a.heads / a.kv_heads);
  p.query_tiles = (p.queries + S::kQueryTile - 1) / S::kQueryTile;
  check(static_cast<int64_t>(p.query_tiles) * p.heads < kRowLimit, "the tiles of one launch fit 30 bits");
  p.first_query = a.first_query;
  p.doc_start = a.doc_start;
  p.landmark_bias = a.landmark_bias;
  p.scale_log2 = a.scale * std::numbers::log2e_v<float>;
  p.out = reinterpret_cast<__nv_bfloat16*>(a.out);
  p.lse = a.lse;
  p.q = head_rows_map(a.q, a.queries, a.heads, kDim, a.heads * kDim, S::kQueryTile);
  constexpr int kBoxRows = kKeyTile / S::kCluster;
  p.fallback_band = -1;
  for (int i = 0; i < p.bands; ++i) {
    const BandKeys<BFloat16>& keys = a.bands[static_cast<size_t>(i)];
    check(keys.count < kRowLimit, "the keys of a band fit 30 bits");
    p.band[i] = {keys.band, keys.first_key, static_cast<int>(keys.count), keys.band.stride > 1 ? 1.0F : 0.0F};
    if (keys.count == 0) continue;
    const int64_t stride = keys.row_stride > 0 ? keys.row_stride : a.kv_heads * kDim;
    p.k[i] = head_rows_map(keys.k, keys.count, a.kv_heads, kDim, stride, kBoxRows);
    p.v[i] = head_rows_map(keys.v, keys.count, a.kv_heads, kDim, stride, kBoxRows);
    p.fallback_band = i;
  }
  if (p.fallback_band < 0) {  // no keys at all: any readable rows will do, they are masked
    p.fallback_band = 0;
    p.k[0] = p.v[0] = head_rows_map(a.q, a.queries, a.heads, kDim, a.heads * kDim, kBoxRows);
  }
  constexpr int kSharedBytes = sizeof(SharedMemory<S>);
  static_assert(kSharedBytes <= 227 * 1024);
  static const cudaError_t opted_in =
      cudaFuncSetAttribute(hopper_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  check_cuda(opted_in, "asking for shared memory");

  cudaLaunchConfig_t config{};
  config.gridDim =
      std::min(p.query_tiles * p.heads, current_device_info().multiprocessors / S::kCluster * S::kCluster);
  config.blockDim = S::kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {S::kCluster, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, hopper_kernel<S>, p), "launching attention_hopper");
  check_launch("attention_hopper", stream);
}

template <int kDim>
void launch_shape(StreamHandle stream, const Attention<BFloat16>& a) {
  const bool pairs = a.heads / a.kv_heads % 2 == 0;
  pairs ? launch<Shape<kDim, 2>>(stream, a) : launch<Shape<kDim, 1>>(stream, a);
}

}  // namespace

void attention_hopper(StreamHandle stream, const Attention<BFloat16>& problem) {
  problem.head_dim == 128 ? launch_shape<128>(stream, problem) : launch_shape<64>(stream, problem);
}

}  // namespace longhalo

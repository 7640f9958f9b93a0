// The portable gradient of keys and values (sm_80 and later): dk and dv, each written once.
//
// One block of four warps owns a tile of keys of one KV head and passes over the tiles of queries that see
// it, for each head of the group: scores (K Q^T) and d_out . v (V d_out^T) are made anew, and
//     dv += P d_out,   dk += dS q
// sum up in registers. No two blocks add to the same key, so there are no atomics and the order of every sum
// is fixed. Which queries see a key is a range of rows, so that neither tiles nor masks need a division.
//
// Few keys that many queries see (landmarks) would leave most multiprocessors idle: the queries of such a
// band's tiles are dealt out in `chunks`, whose sums go to the workspace and are added in order afterwards.
//
// Keys and values stay in shared memory; queries and d_out pass through a ring of three places, q, d_out, q,
// ...: d_out of a tile arrives while its scores are made, the queries of the next while it is worked on.
#include <algorithm>
#include <array>
#include <numbers>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "kernels/attention/attention_cuda.hpp"
#include "kernels/attention/portable_gradient.cuh"

namespace longhalo {
namespace {

// With d 128 the sums of 16 keys a warp fill half of its registers, with d 64 those of 32.
template <int kDim>
struct Shape : RowShape<kDim> {
  using RowShape<kDim>::kPitch;
  static constexpr int kM = kDim == 128 ? 1 : 2;
  static constexpr int kKeyTile = 16 * kM * kGradientWarps;
  static constexpr int kCols = kDim == 128 ? 64 : 32;  // queries of a tile
  static constexpr int kKeyBytes = kKeyTile * kPitch;
  static constexpr int kPlaceBytes = kCols * kPitch;
  static constexpr int kRing = 2 * kKeyBytes;  // where it begins
  static constexpr int kRows = kRing + 3 * kPlaceBytes;
  static constexpr int kRanges = kRows + 4 * kCols * int{sizeof(float)};
  static constexpr int kSharedBytes = kRanges + 2 * kKeyTile * int{sizeof(int)};
};

// One band's tiles of keys: blocks [first_block, next band's), in the order (tile, chunk, KV head).
struct Work {
  BandRows keys;
  float *dk, *dv;
  int64_t row_stride;  // of dk and dv
  float* partial;      // [chunks, 2, count, H_kv, d], or nullptr: add to dk and dv
  int chunks;
  int first_block;
  bool biased;
};

struct Parameters {
  Work work[kMaxBands];
  int works;
  int queries, padded_queries, heads, kv_heads, group;
  int64_t first_query;
  const int64_t* doc_start;
  const float* landmark_bias;
  float scale, scale_log2;
  const __nv_bfloat16 *q, *d_out;
  const float *lse, *delta;  // [H, padded_queries]
};

// How many rows of q belong to documents that begin at `token` or before.
__device__ int rows_of_documents_until(const Parameters& p, int64_t token) {
  int low = 0, high = p.queries;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (p.doc_start[middle] <= token)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// The rows of q that see row `row` of a band: the conditions of bands.hpp solved for the query. Both ends
// grow with the key; the range may be empty with its end before its beginning.
__device__ RowRange rows_that_see(const Parameters& p, const BandRows& keys, int row) {
  const int64_t s = keys.band.stride, near = keys.band.near, far = keys.band.far;
  const int64_t token = (keys.first_key + row) * s;
  const int64_t begin = token + (near > s - 1 ? near : s - 1) - p.first_query;
  const int64_t all = p.queries;
  // Reaching further back than any query is old, a band never ends: far may be the largest number there is.
  int64_t end = far > p.first_query + all ? all : token + s - 1 + far - p.first_query;
  end = end < 0 ? 0 : end > all ? all : end;
  if (p.doc_start != nullptr) {
    const int64_t documents = rows_of_documents_until(p, token);
    end = end < documents ? end : documents;
  }
  return {static_cast<int>(begin < 0 ? 0 : begin > all ? all : begin), static_cast<int>(end)};
}

// A tile of queries of one head of the group.
struct Turn {
  int head, tile;
};

template <int kDim>
__global__ void __launch_bounds__(kGradientThreads, 2)
    key_gradients_kernel(const __grid_constant__ Parameters p) {
  using S = Shape<kDim>;
  constexpr int kM = S::kM, kCols = S::kCols;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;

  int index = 0;
  while (index + 1 < p.works && static_cast<int>(blockIdx.x) >= p.work[index + 1].first_block)
    ++index;
  const Work& work = p.work[index];
  const int block = static_cast<int>(blockIdx.x) - work.first_block;
  const int kv_head = block % p.kv_heads, chunk = block / p.kv_heads % work.chunks;
  const int first_key = block / p.kv_heads / work.chunks * S::kKeyTile;
  const int keys = min(S::kKeyTile, work.keys.count - first_key);

  // For each key of the tile the rows of q that see it; none for what is behind the last key.
  int* const begins = reinterpret_cast<int*>(shared + S::kRanges);
  int* const ends = begins + S::kKeyTile;
  if (thread < S::kKeyTile) {
    const RowRange seen =
        thread < keys ? rows_that_see(p, work.keys, first_key + thread) : RowRange{p.queries, 0};
    begins[thread] = seen.begin, ends[thread] = seen.end;
  }
  __syncthreads();
  const int first_row = begins[0], end_row = ends[keys - 1];
  const int full_begin = begins[S::kKeyTile - 1], full_end = keys == S::kKeyTile ? ends[0] : 0;
  const int tiles = end_row > first_row ? (end_row - first_row + kCols - 1) / kCols : 0;
  const int64_t all = static_cast<int64_t>(tiles) * p.group;
  const int first_turn = static_cast<int>(all * chunk / work.chunks),
            end_turn = static_cast<int>(all * (chunk + 1) / work.chunks);
  if (first_turn == end_turn && work.partial == nullptr) return;

  const uint32_t base = shared_offset(shared);
  // Stage `turn % 2`: lse and D of the tile's queries.
  const auto rows_of_stage = [&](int turn) {
    return reinterpret_cast<float*>(shared + S::kRows) + turn % 2 * 2 * kCols;
  };
  const auto load_queries = [&](const __nv_bfloat16* from, uint32_t place, Turn at) {
    const int row = first_row + at.tile * kCols, head = kv_head * p.group + at.head;
    load_tile<kDim, kCols>(base + S::kRing + place,
                           from + (static_cast<int64_t>(row) * p.heads + head) * kDim,
                           static_cast<int64_t>(p.heads) * kDim, p.queries - row);
  };
  const auto load_rows = [&](int turn, Turn at) {
    const int which = thread / kCols, column = thread % kCols;  // lse, then D
    if (which >= 2) return;
    const int row = first_row + at.tile * kCols + column, head = kv_head * p.group + at.head;
    const float* const from = (which == 0 ? p.lse : p.delta) + static_cast<int64_t>(head) * p.padded_queries;
    const bool there = row < p.queries;
    copy_async_4_or_zero(shared_offset(rows_of_stage(turn) + thread), there ? from + row : from, there);
  };
  const auto following = [](uint32_t place) {
    return place == 2 * S::kPlaceBytes ? 0 : place + S::kPlaceBytes;
  };

  TileSums<kM, kDim> dk, dv;
  clear<kM, kDim>(dk);
  clear<kM, kDim>(dv);
  Turn at{first_turn / max(tiles, 1), first_turn % max(tiles, 1)};
  if (first_turn < end_turn) {
    const int64_t from = first_key * work.keys.row_stride + kv_head * kDim;
    load_tile<kDim, S::kKeyTile>(base, work.keys.k + from, work.keys.row_stride, keys);
    load_tile<kDim, S::kKeyTile>(base + S::kKeyBytes, work.keys.v + from, work.keys.row_stride, keys);
    load_queries(p.q, 0, at);
    load_rows(first_turn, at);
  }
  copy_async_commit();

  const uint32_t k_lane = base + 16 * kM * warp * S::kPitch + left_lane<kDim>(lane);
  const uint32_t ring = base + S::kRing;
  uint32_t place = 0;  // of the ring, where the queries at hand lie
  for (int turn = first_turn; turn < end_turn; ++turn) {
    const Turn next = at.tile + 1 == tiles ? Turn{at.head + 1, 0} : Turn{at.head, at.tile + 1};
    const int row = first_row + at.tile * kCols;
    const bool masked = row < full_begin || row + kCols > full_end;
    const float bias =
        work.biased ? p.landmark_bias[kv_head * p.group + at.head] * std::numbers::log2e_v<float> : 0;
    copy_async_wait<0>();
    __syncthreads();  // the queries are here, and nobody reads the other two places any more
    const uint32_t d_out_place = following(place), next_place = following(d_out_place);
    load_queries(p.d_out, d_out_place, at);
    copy_async_commit();
    if (turn + 1 < end_turn) {
      load_queries(p.q, next_place, next);
      load_rows(turn + 1, next);
    }
    copy_async_commit();  // an empty group too: waiting counts groups

    ColumnRanges<kM> seen;
    if (masked) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = 16 * (kM * warp + m) + 8 * half + lane / 4;
          seen.begin[m][half] = begins[key] - row, seen.end[m][half] = ends[key] - row;
        }
      }
    }
    const float* const lse = rows_of_stage(turn);
    const float* const delta = lse + kCols;
    TileSums<kM, kCols> weights;
    rows_times_rows<kDim, kM, kCols, true>(weights, k_lane, ring + place + right_lane<kDim>(lane));
    if (masked) mask_tile<kM, kCols>(weights, seen, -INFINITY);
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      const float2 of_columns = *reinterpret_cast<const float2*>(lse + 8 * n + 2 * (lane % 4));
      const float shift[2] = {bias - of_columns.x, bias - of_columns.y};
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int c = 0; c < 4; ++c)
          weights[m][n][c] = exp2_fast(fmaf(weights[m][n][c], p.scale_log2, shift[c % 2]));
      }
    }

    copy_async_wait<1>();
    if (!masked) {
      __syncthreads();
    } else if (__syncthreads_or(thread < kCols && lse[thread] == INFINITY)) {
      // Rows that see nothing have weights of 0, which what stands in them must not turn into NaN.
      for (int x = thread; x < kCols * S::kChunks; x += kGradientThreads) {
        if (lse[x / S::kChunks] != INFINITY) continue;
        for (uint32_t where : {place, d_out_place})
          *reinterpret_cast<uint4*>(shared + S::kRing + where + x * 16) = make_uint4(0, 0, 0, 0);
      }
      __syncthreads();
    }
    TileWeights<kM, kCols> rounded;
    round_weights<kM, kCols>(rounded, weights);
    add_weighted_rows<kDim, kM, kCols>(dv, rounded, ring + d_out_place + weighted_lane<kDim>(lane));
    TileSums<kM, kCols> inner;  // d_out . v - D
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      const float2 of_columns = *reinterpret_cast<const float2*>(delta + 8 * n + 2 * (lane % 4));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int c = 0; c < 4; ++c)
          inner[m][n][c] = c % 2 == 0 ? -of_columns.x : -of_columns.y;
      }
    }
    rows_times_rows<kDim, kM, kCols, false>(inner, k_lane + S::kKeyBytes,
                                            ring + d_out_place + right_lane<kDim>(lane));
    if (masked) mask_tile<kM, kCols>(inner, seen, 0);  // a value that nobody sees may be NaN
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c)
          weights[m][n][c] *= inner[m][n][c];
      }
    }
    round_weights<kM, kCols>(rounded, weights);
    add_weighted_rows<kDim, kM, kCols>(dk, rounded, ring + place + weighted_lane<kDim>(lane));
    place = next_place;
    at = next;
  }

  const int64_t width = static_cast<int64_t>(p.kv_heads) * kDim;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = 16 * (kM * warp + m) + 8 * half + lane / 4;
      if (key >= keys) continue;
      const int64_t column = kv_head * kDim + 2 * (lane % 4);
      if (work.partial != nullptr) {
        float* const to =
            work.partial + (int64_t{2} * chunk * work.keys.count + first_key + key) * width + column;
        const int64_t values = work.keys.count * width;  // from keys to values
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          *reinterpret_cast<float2*>(to + 8 * n) =
              make_float2(dk[m][n][2 * half] * p.scale, dk[m][n][2 * half + 1] * p.scale);
          *reinterpret_cast<float2*>(to + values + 8 * n) =
              make_float2(dv[m][n][2 * half], dv[m][n][2 * half + 1]);
        }
      } else {
        const int64_t to = (first_key + key) * work.row_stride + column;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          float2* const k = reinterpret_cast<float2*>(work.dk + to + 8 * n);
          float2* const v = reinterpret_cast<float2*>(work.dv + to + 8 * n);
          const float2 old_k = *k, old_v = *v;
          *k = make_float2(fmaf(dk[m][n][2 * half], p.scale, old_k.x),
                           fmaf(dk[m][n][2 * half + 1], p.scale, old_k.y));
          *v = make_float2(old_v.x + dv[m][n][2 * half], old_v.y + dv[m][n][2 * half + 1]);
        }
      }
    }
  }
}

// How the tiles of a band's keys are dealt out.
struct BandPlan {
  int key_tiles, chunks;
  int64_t partial;  // floats of the workspace
};

constexpr int64_t kWantedBlocks = 512;  // twice what the largest GPUs run at once
constexpr int64_t kLeastTurns = 16;     // of a chunk: what makes reading the keys and writing the sums cheap

template <int kDim>
BandPlan plan_band(const Attention<BFloat16>& p, const BandKeys<BFloat16>& keys) {
  using S = Shape<kDim>;
  BandPlan plan{static_cast<int>((keys.count + S::kKeyTile - 1) / S::kKeyTile), 1, 0};
  if (plan.key_tiles == 0) return plan;
  const int64_t width = S::kKeyTile * keys.band.stride;  // tokens of a tile of keys
  const int64_t seen_by = keys.band.far >= p.queries - width ? p.queries : keys.band.far + width;
  const int64_t turns = (std::min(seen_by, p.queries) + S::kCols - 1) / S::kCols * (p.heads / p.kv_heads);
  const int64_t blocks = plan.key_tiles * p.kv_heads;
  plan.chunks = static_cast<int>(
      std::max<int64_t>(1, std::min((kWantedBlocks + blocks - 1) / blocks, turns / kLeastTurns)));
  if (plan.chunks > 1) plan.partial = int64_t{2} * plan.chunks * keys.count * p.kv_heads * kDim;
  return plan;
}

BandPlan plan_band(const Attention<BFloat16>& p, size_t band) {
  return p.head_dim == 128 ? plan_band<128>(p, p.bands[band]) : plan_band<64>(p, p.bands[band]);
}

template <int kDim>
void launch(StreamHandle stream, const Parameters& parameters, int blocks) {
  using S = Shape<kDim>;
  check_cuda(cudaFuncSetAttribute(key_gradients_kernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  S::kSharedBytes),
             "shared memory of the gradient of attention's keys");
  key_gradients_kernel<kDim>
      <<<static_cast<unsigned>(blocks), kGradientThreads, S::kSharedBytes, stream>>>(parameters);
  check_launch("attention's gradient of keys and values (portable)", stream);
}

}  // namespace

int64_t attention_backward_keys_floats(const Attention<BFloat16>& p) {
  int64_t floats = 0;
  for (size_t b = 0; b < p.bands.size(); ++b)
    floats += plan_band(p, b).partial;
  return floats;
}

void attention_backward_keys(StreamHandle stream, const AttentionGradient<BFloat16>& gradient,
                             const float* lse_log2, const float* delta, float* workspace) {
  const Attention<BFloat16>& problem = gradient.forward;
  Parameters p{};
  p.queries = static_cast<int>(problem.queries);
  p.padded_queries = static_cast<int>(attention_backward_padded(problem.queries));
  p.heads = static_cast<int>(problem.heads), p.kv_heads = static_cast<int>(problem.kv_heads);
  p.group = p.heads / p.kv_heads;
  p.first_query = problem.first_query;
  p.doc_start = problem.doc_start, p.landmark_bias = problem.landmark_bias;
  p.scale = problem.scale, p.scale_log2 = problem.scale * std::numbers::log2e_v<float>;
  p.q = reinterpret_cast<const __nv_bfloat16*>(problem.q);
  p.d_out = reinterpret_cast<const __nv_bfloat16*>(gradient.d_out);
  p.lse = lse_log2, p.delta = delta;
  check(problem.queries * p.group <= INT32_MAX, "a GPU has less than 2^31 queries of a group");
  const int64_t width = problem.kv_heads * problem.head_dim;
  int64_t blocks = 0;
  std::array<BandPlan, kMaxBands> plans{};
  for (size_t b = problem.bands.size(); b-- > 0;) {  // bands of large strides, the longest work, come first
    plans[b] = plan_band(problem, b);
    if (plans[b].key_tiles == 0) continue;
    const BandGradient<BFloat16>& to = gradient.d_bands[b];
    p.work[p.works++] = {band_rows(problem.bands[b], width),
                         to.dk,
                         to.dv,
                         to.row_stride != 0 ? to.row_stride : width,
                         plans[b].partial > 0 ? workspace : nullptr,
                         plans[b].chunks,
                         static_cast<int>(blocks),
                         problem.bands[b].band.stride > 1 && problem.landmark_bias != nullptr};
    workspace += plans[b].partial;
    blocks += static_cast<int64_t>(plans[b].key_tiles) * plans[b].chunks * problem.kv_heads;
    check(blocks <= INT32_MAX, "a grid of attention blocks has less than 2^31 of them");
  }
  if (blocks == 0) return;
  problem.head_dim == 128 ? launch<128>(stream, p, static_cast<int>(blocks))
                          : launch<64>(stream, p, static_cast<int>(blocks));
  for (int x = 0; x < p.works; ++x) {
    const Work& work = p.work[x];
    if (work.partial == nullptr) continue;
    add_key_partials(stream,
                     {work.partial, work.chunks, work.keys.count, width, work.dk, work.dv, work.row_stride});
  }
}

}  // namespace longhalo

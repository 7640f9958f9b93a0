// The portable gradient of queries (sm_80 and later): dq, and the sums of the landmark bias.
//
// As in the forward kernel (attention_portable.cu) one block of four warps works on 128 queries of one head,
// 32 of them a warp, and visits of each band only the keys that some of them see. Queries and d_out stay in
// shared memory; tiles of 32 keys and values pass through two stages, one worked on while the next arrives.
// With scores (Q K^T) and d_out . v (d_out V^T) made anew, dq += dS K sums up in registers and is written
// once. Blocks with the most keys (the last) start first.
#include <numbers>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "kernels/attention/attention_cuda.hpp"
#include "kernels/attention/portable_gradient.cuh"

namespace longhalo {
namespace {

constexpr int kM = 2;
constexpr int kQueryTile = 16 * kM * kGradientWarps;
constexpr int kCols = 32;  // keys of a tile

struct Parameters {
  BandRows band[kMaxBands];
  int bands;
  int queries, padded_queries, heads, group, query_tiles;
  int64_t first_query;
  const int64_t* doc_start;
  const float* landmark_bias;
  float scale, scale_log2;
  const __nv_bfloat16 *q, *d_out;
  const float *lse, *delta;  // [H, padded_queries]
  __nv_bfloat16* dq;
  float* d_bias;  // [query_tiles, H], or nullptr
};

// A band as the queries of one block see it: rows that some see, rows that all see, and where they are.
struct Span {
  int begin, end;
  int full_begin, full_end;
  const __nv_bfloat16 *k, *v;  // of this KV head
  int64_t row_stride;
};

template <int kDim>
struct Shape : RowShape<kDim> {
  using RowShape<kDim>::kPitch;
  static constexpr int kQueryBytes = kQueryTile * kPitch;
  static constexpr int kPlaceBytes = kCols * kPitch;
  static constexpr int kRing = 2 * kQueryBytes;  // where it begins: K, V, K, V
  static constexpr int kSpans = kRing + 4 * kPlaceBytes;
  static constexpr int kSums = kSpans + kMaxBands * int{sizeof(Span)};
  static constexpr int kSharedBytes = kSums + kGradientWarps * int{sizeof(float)};
};

// Where the block's next tile of keys begins.
struct Cursor {
  int band, row;
};

__device__ __forceinline__ Cursor first_at_or_after(Cursor at, const Span* spans, int bands) {
  while (at.band < bands && at.row >= spans[at.band].end) {
    ++at.band;
    if (at.band < bands) at.row = spans[at.band].begin;
  }
  return at;
}

// Writes a warp's 32 rows. `place` is where its queries lay in shared memory: dq passes through it, so that
// whole rows are written at once.
template <int kDim>
__device__ __forceinline__ void write_rows(const Parameters& p, const TileSums<kM, kDim>& dq, uint8_t* place,
                                           int head, int first_row) {
  using S = Shape<kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * m + 8 * half + lane / 4;
      uint8_t* const to = place + row * S::kPitch + 4 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        *reinterpret_cast<uint32_t*>(to + ((n ^ (row & 7)) << 4)) =
            pack_bf16(dq[m][n][2 * half] * p.scale, dq[m][n][2 * half + 1] * p.scale);
    }
  }
  __syncwarp();
#pragma unroll
  for (int at = lane; at < 32 * S::kChunks; at += 32) {
    const int row = at / S::kChunks, chunk = at % S::kChunks;
    if (first_row + row >= p.queries) continue;
    const uint4 bits = *reinterpret_cast<const uint4*>(place + row * S::kPitch + ((chunk ^ (row & 7)) << 4));
    __nv_bfloat16* const to =
        p.dq + (static_cast<int64_t>(first_row + row) * p.heads + head) * kDim + chunk * 8;
    *reinterpret_cast<uint4*>(to) = bits;
  }
}

template <int kDim>
__global__ void __launch_bounds__(kGradientThreads, 2)
    query_gradients_kernel(const __grid_constant__ Parameters p) {
  using S = Shape<kDim>;
  extern __shared__ __align__(1024) uint8_t shared[];
  Span* const spans = reinterpret_cast<Span*>(shared + S::kSpans);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int head = static_cast<int>(blockIdx.x) % p.heads;
  const int tile = p.query_tiles - 1 - static_cast<int>(blockIdx.x) / p.heads, tile_row = tile * kQueryTile;
  const int last_row = min(tile_row + kQueryTile, p.queries) - 1;
  const auto seen_by = [&](int band, int row) {
    return visible_rows(p.band[band], p.first_query + row, p.doc_start != nullptr ? p.doc_start[row] : 0);
  };

  const uint32_t base = shared_offset(shared);
  const int64_t from = (static_cast<int64_t>(tile_row) * p.heads + head) * kDim;
  const int64_t stride = static_cast<int64_t>(p.heads) * kDim;
  load_tile<kDim, kQueryTile>(base, p.q + from, stride, p.queries - tile_row);
  load_tile<kDim, kQueryTile>(base + S::kQueryBytes, p.d_out + from, stride, p.queries - tile_row);
  if (thread < p.bands) {
    const RowRange first = seen_by(thread, tile_row), last = seen_by(thread, last_row);
    const BandRows& band = p.band[thread];
    const int kv_head = head / p.group;
    spans[thread] = {
        first.begin,    last.end, last.begin, first.end, band.k + kv_head * kDim, band.v + kv_head * kDim,
        band.row_stride};
  }
  __syncthreads();

  const auto load = [&](int stage, Cursor at) {
    if (at.band < p.bands) {
      const Span& span = spans[at.band];
      const int64_t row = at.row * span.row_stride;
      const uint32_t to = base + S::kRing + stage * 2 * S::kPlaceBytes;
      load_tile<kDim, kCols>(to, span.k + row, span.row_stride, span.end - at.row);
      load_tile<kDim, kCols>(to + S::kPlaceBytes, span.v + row, span.row_stride, span.end - at.row);
    }
    copy_async_commit();
  };
  float lse[kM][2], delta[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row =
          static_cast<int64_t>(head) * p.padded_queries + tile_row + 32 * warp + 16 * m + 8 * half + lane / 4;
      lse[m][half] = p.lse[row], delta[m][half] = p.delta[row];
    }
  }

  TileSums<kM, kDim> dq;
  clear<kM, kDim>(dq);
  const uint32_t q_lane = base + 32 * warp * S::kPitch + left_lane<kDim>(lane);
  Cursor at = first_at_or_after({0, spans[0].begin}, spans, p.bands);
  load(0, at);
  int stage = 0;
  RowRange seen{0, 0};  // by the warp's query number `lane`, in the band at hand
  float shift[kM][2];
  float d_bias = 0;
  bool strided = false;
  int band = -1;
  while (at.band < p.bands) {
    if (at.band != band) {
      band = at.band;
      seen = seen_by(band, min(tile_row + 32 * warp + lane, last_row));
      strided = p.band[band].band.stride > 1;
      const float bias =
          strided && p.landmark_bias != nullptr ? p.landmark_bias[head] * std::numbers::log2e_v<float> : 0;
#pragma unroll
      for (int m = 0; m < kM; ++m)
        shift[m][0] = bias - lse[m][0], shift[m][1] = bias - lse[m][1];
    }
    const Cursor next = first_at_or_after({at.band, at.row + kCols}, spans, p.bands);
    copy_async_wait<0>();
    __syncthreads();  // this tile is here, and nobody reads the other stage any more
    load(1 - stage, next);

    const uint32_t k = base + S::kRing + stage * 2 * S::kPlaceBytes, v = k + S::kPlaceBytes;
    const bool masked = at.row < spans[band].full_begin || at.row + kCols > spans[band].full_end;
    ColumnRanges<kM> columns;
    if (masked) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * m + 8 * half + lane / 4;
          columns.begin[m][half] = __shfl_sync(kWholeWarp, seen.begin, row) - at.row;
          columns.end[m][half] = __shfl_sync(kWholeWarp, seen.end, row) - at.row;
        }
      }
    }
    TileSums<kM, kCols> weights, inner;  // inner: d_out . v - D
    rows_times_rows<kDim, kM, kCols, true>(weights, q_lane, k + right_lane<kDim>(lane));
    if (masked) mask_tile<kM, kCols>(weights, columns, -INFINITY);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          weights[m][n][c] = exp2_fast(fmaf(weights[m][n][c], p.scale_log2, shift[m][c / 2]));
          inner[m][n][c] = -delta[m][c / 2];
        }
      }
    }
    rows_times_rows<kDim, kM, kCols, false>(inner, q_lane + S::kQueryBytes, v + right_lane<kDim>(lane));
    if (masked) mask_tile<kM, kCols>(inner, columns, 0);  // d_out of a row that sees nothing may be NaN
    float sum = 0;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          weights[m][n][c] *= inner[m][n][c];
          sum += weights[m][n][c];
        }
      }
    }
    if (strided) d_bias += sum;
    TileWeights<kM, kCols> rounded;
    round_weights<kM, kCols>(rounded, weights);
    add_weighted_rows<kDim, kM, kCols>(dq, rounded, k + weighted_lane<kDim>(lane));
    stage = 1 - stage;
    at = next;
  }
  copy_async_wait<0>();  // a block that sees no keys at all still waits for its queries
  float* const sums = reinterpret_cast<float*>(shared + S::kSums);
  for (int lanes = 16; lanes > 0; lanes /= 2)
    d_bias += __shfl_xor_sync(kWholeWarp, d_bias, lanes);
  if (lane == 0) sums[warp] = d_bias;
  __syncthreads();
  if (p.d_bias != nullptr && thread == 0)
    p.d_bias[static_cast<int64_t>(tile) * p.heads + head] = sums[0] + sums[1] + sums[2] + sums[3];
  write_rows<kDim>(p, dq, shared + 32 * warp * S::kPitch, head, tile_row + 32 * warp);
}

template <int kDim>
void launch(StreamHandle stream, const Parameters& parameters) {
  using S = Shape<kDim>;
  const int64_t blocks = static_cast<int64_t>(parameters.query_tiles) * parameters.heads;
  check(blocks <= INT32_MAX, "a grid of attention blocks has less than 2^31 of them");
  check_cuda(cudaFuncSetAttribute(query_gradients_kernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  S::kSharedBytes),
             "shared memory of the gradient of attention's queries");
  query_gradients_kernel<kDim>
      <<<static_cast<unsigned>(blocks), kGradientThreads, S::kSharedBytes, stream>>>(parameters);
  check_launch("attention's gradient of queries (portable)", stream);
}

}  // namespace

int64_t attention_backward_queries_floats(const Attention<BFloat16>& p) {
  return (p.queries + kQueryTile - 1) / kQueryTile * p.heads;
}

void attention_backward_queries(StreamHandle stream, const AttentionGradient<BFloat16>& gradient,
                                const float* lse_log2, const float* delta, float* workspace) {
  const Attention<BFloat16>& problem = gradient.forward;
  Parameters p{};
  p.bands = static_cast<int>(problem.bands.size());
  for (size_t b = 0; b < problem.bands.size(); ++b)
    p.band[b] = band_rows(problem.bands[b], problem.kv_heads * problem.head_dim);
  p.queries = static_cast<int>(problem.queries), p.heads = static_cast<int>(problem.heads);
  p.padded_queries = static_cast<int>(attention_backward_padded(problem.queries));
  p.group = static_cast<int>(problem.heads / problem.kv_heads);
  p.query_tiles = (p.queries + kQueryTile - 1) / kQueryTile;
  p.first_query = problem.first_query;
  p.doc_start = problem.doc_start, p.landmark_bias = problem.landmark_bias;
  p.scale = problem.scale, p.scale_log2 = problem.scale * std::numbers::log2e_v<float>;
  p.q = reinterpret_cast<const __nv_bfloat16*>(problem.q);
  p.d_out = reinterpret_cast<const __nv_bfloat16*>(gradient.d_out);
  p.lse = lse_log2, p.delta = delta;
  p.dq = reinterpret_cast<__nv_bfloat16*>(gradient.dq);
  p.d_bias = gradient.d_landmark_bias != nullptr ? workspace : nullptr;
  problem.head_dim == 128 ? launch<128>(stream, p) : launch<64>(stream, p);
  if (gradient.d_landmark_bias != nullptr)
    add_bias_partials(stream, workspace, p.query_tiles, problem.heads, gradient.d_landmark_bias);
}

}  // namespace longhalo

// Attention over bands for every GPU from Ampere on (sm_80): cp.async, ldmatrix, mma.sync.
//
// One block of four warps works on 128 queries of one head; each warp owns 32 of them, so that a fragment of
// keys or values read from shared memory serves two rows of tensor-core tiles: with 16 queries a warp, shared
// memory would be the limit, not the tensor cores. Keys and values of 64-key tiles pass through one ring of
// three places, K, V, K, V, ...: while one is worked on, the next two are on their way. Two blocks share a
// multiprocessor, so that one multiplies while the other computes exponentials; within a warp the
// exponentials of 16 keys run between the products of the 16 before.
//
// Of each band only the key tiles that some query of the block sees are visited, from the first such key on
// (not from a multiple of 64), and a tile is masked only when some of its keys are not seen by some query.
// Keys that no query of the block sees are never read. Blocks with the most keys (the last) start first, and
// the heads of a group, which share their keys, start one after the other: keys come from L2.
//
// Scores are in units of log2. Weights are relative to a maximum that is sought only until every row of a
// warp has seen a key: nearly always it will do for the tiles that follow. Where their weights become large,
// sums are scaled down; where they become so large that a tile may be lost, the block begins again, and seeks
// the maximum in every tile.
#include <cmath>
#include <numbers>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "kernels/attention/attention_cuda.hpp"
#include "kernels/attention/band_rows.cuh"
#include "kernels/common/mma.cuh"

namespace longhalo {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kQueryTile = 32 * kWarps;
constexpr int kKeyTile = 64;
constexpr int kKeySteps = kKeyTile / 16;
constexpr float kLag = 8;
constexpr float kLarge = 0x1p32F;     // sums beyond it are scaled by its inverse
constexpr float kTooLarge = 0x1p64F;  // one tile made of more is not trusted
constexpr float kLowest = -1e30F;     // below every score; finite, so that differences are never NaN
constexpr unsigned kAll = 0xffffffffU;

struct Parameters {
  BandRows band[kMaxBands];
  int bands;
  int queries, heads, group, query_tiles;
  int64_t first_query;
  const int64_t* doc_start;
  const float* landmark_bias;
  float scale_log2;
  const __nv_bfloat16* q;
  __nv_bfloat16* out;
  float* lse;
};

// A band as the queries of one block see it: rows that some see, rows that all see, and where they are.
struct Span {
  int begin, end;
  int full_begin, full_end;
  const __nv_bfloat16 *k, *v;  // of this KV head
  int64_t row_stride;
};

// Shared memory holds rows of 2 d bytes. The 16-byte chunk c of row r lies at place c ^ (r % 8) of the row
// (the low three bits), so that 8 rows at the same chunk, what ldmatrix reads, lie in different banks.
template <int kDim>
struct Shape {
  static constexpr int kPitch = 2 * kDim;
  static constexpr int kChunks = kDim / 8;
  static constexpr int kDepth = kDim / 16;  // steps of the first product, pairs of column tiles of the second
  static constexpr int kQueryBytes = kQueryTile * kPitch;
  static constexpr int kPlaceBytes = kKeyTile * kPitch;
  static constexpr int kPlaces = 3;
  static constexpr int kSharedBytes = kQueryBytes + kPlaces * kPlaceBytes + kMaxBands * int{sizeof(Span)};
  static constexpr int kBlocksPerMultiprocessor = kDim == 128 ? 2 : 3;
};

// Where the blocks' next tile of keys begins.
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

// Starts the copy of `kRows` rows of d numbers, zeros from row `count` on (counted from `from`).
template <int kDim, int kRows>
__device__ __forceinline__ void load_rows(uint32_t to, const __nv_bfloat16* from, int64_t row_stride,
                                          int count) {
  using S = Shape<kDim>;
  constexpr int kStep = kThreads / S::kChunks;  // rows that the block copies at once: a multiple of 8
  const int row = static_cast<int>(threadIdx.x) / S::kChunks,
            chunk = static_cast<int>(threadIdx.x) % S::kChunks;
  to += static_cast<uint32_t>(row * S::kPitch + ((chunk ^ (row & 7)) << 4));
  const __nv_bfloat16* source = from + row * row_stride + chunk * 8;
  if (count >= kRows) {
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
      copy_async_16(to + r * S::kPitch, source);
      source += kStep * row_stride;
    }
  } else {
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
      const bool there = row + r < count;
      copy_async_16_or_zero(to + r * S::kPitch, there ? source : from, there);
      source += kStep * row_stride;
    }
  }
}

// What one lane holds: of its warp's 32 queries those at 16 m + 8 half + lane / 4, and of each a quarter of
// the columns (mma.cuh).
template <int kDim>
struct Rows {
  float out[2][kDim / 8][4];
  float top[2][2];  // what weights are relative to
  float sum[2][2];  // of this lane's weights
};

using Scores = float[2][kKeyTile / 8][4];

// scores = Q K^T. `q` and `k` are the lane's addresses of the first fragments.
template <int kDim>
__device__ __forceinline__ void multiply_keys(Scores& scores, uint32_t q, uint32_t k) {
  using S = Shape<kDim>;
  const float zero[4] = {0, 0, 0, 0};
#pragma unroll
  for (int step = 0; step < S::kDepth; ++step) {
    const uint32_t swizzle = (step & 3) << 5, far = (step >> 2) << 7;
    uint32_t a[2][4];
    load_matrices(a[0], (q ^ swizzle) + far);
    load_matrices(a[1], (q ^ swizzle) + far + 16 * S::kPitch);
#pragma unroll
    for (int pair = 0; pair < kKeyTile / 16; ++pair) {
      uint32_t b[4];
      load_matrices(b, (k ^ swizzle) + far + pair * 16 * S::kPitch);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float(&sum)[4] = scores[m][2 * pair + side];
          if (step == 0)
            multiply_add(sum, a[m], b[2 * side], b[2 * side + 1], zero);
          else
            multiply_add(sum, a[m], b[2 * side], b[2 * side + 1], sum);
        }
      }
    }
  }
}

// Removes keys that a row does not see. `seen` is that of the warp's query number `lane`, relative to the
// tile's first key.
__device__ __forceinline__ void mask(Scores& scores, RowRange seen) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * m + 8 * half + lane / 4;
      const int begin = __shfl_sync(kAll, seen.begin, row) - 2 * (lane % 4);
      const int end = __shfl_sync(kAll, seen.end, row) - 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kKeyTile / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = 8 * n + c;
          if (key < begin || key >= end) scores[m][n][2 * half + c] = -INFINITY;
        }
      }
    }
  }
}

// Moves the maxima, and what was summed relative to them, where a row's scores exceed them by too much.
template <int kDim>
__device__ __forceinline__ void raise_maxima(Rows<kDim>& rows, const Scores& scores, float scale,
                                             float bias) {
  float top[2][2];
  bool grew = false;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = fmaxf(scores[m][0][2 * half], scores[m][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < kKeyTile / 8; ++n)
        x = fmaxf(x, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
      x = fmaxf(x, __shfl_xor_sync(kAll, x, 1));
      x = fmaxf(x, __shfl_xor_sync(kAll, x, 2));
      top[m][half] = fmaf(x, scale, bias);
      grew = grew || top[m][half] > rows.top[m][half] + kLag;
    }
  }
  if (!__any_sync(kAll, grew)) return;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old = rows.top[m][half];
      const float now = top[m][half] > old + kLag ? top[m][half] : old;
      const float shrink = exp2_fast(old - now);  // 1 where the row stays
      rows.top[m][half] = now;
      rows.sum[m][half] *= shrink;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        rows.out[m][n][2 * half] *= shrink, rows.out[m][n][2 * half + 1] *= shrink;
    }
  }
}

// Whether every row of the warp has a maximum.
template <int kDim>
__device__ __forceinline__ bool anchored(const Rows<kDim>& rows) {
  const float least = fminf(fminf(rows.top[0][0], rows.top[0][1]), fminf(rows.top[1][0], rows.top[1][1]));
  return __all_sync(kAll, least > kLowest);
}

// After a tile for which no maxima were sought: scales large sums down. False where they were too large.
template <int kDim>
__device__ __forceinline__ bool settle(Rows<kDim>& rows) {
  const auto within = [&](float limit) {  // not so for NaN
    return rows.sum[0][0] <= limit && rows.sum[0][1] <= limit && rows.sum[1][0] <= limit &&
           rows.sum[1][1] <= limit;
  };
  if (__all_sync(kAll, within(kLarge))) return true;
  const bool good = __all_sync(kAll, within(kTooLarge));
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = rows.sum[m][half];  // the four lanes of a row do alike
      sum = fmaxf(sum, __shfl_xor_sync(kAll, sum, 1));
      sum = fmaxf(sum, __shfl_xor_sync(kAll, sum, 2));
      if (!(sum > kLarge)) continue;
      rows.top[m][half] += 32;
      rows.sum[m][half] *= 1 / kLarge;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        rows.out[m][n][2 * half] *= 1 / kLarge, rows.out[m][n][2 * half + 1] *= 1 / kLarge;
    }
  }
  return good;
}

// Weights of the 16 keys of step `step` as the A operand of the second product: register `at` of 8.
__device__ __forceinline__ void weigh(uint32_t (&a)[2][4], int at, const Scores& scores, int step,
                                      float scale, const float (&shift)[2][2], float (&sum)[2][2]) {
  const int m = at / 4, n = 2 * step + at % 4 / 2, half = at % 2;
  const float low = exp2_fast(fmaf(scores[m][n][2 * half], scale, -shift[m][half]));
  const float high = exp2_fast(fmaf(scores[m][n][2 * half + 1], scale, -shift[m][half]));
  sum[m][half] += low + high;
  a[m][at % 4] = pack_bf16(low, high);
}

// out += weights V. `v` is the lane's address of the first fragment.
template <int kDim>
__device__ __forceinline__ void multiply_values(Rows<kDim>& rows, const Scores& scores, uint32_t v,
                                                float scale, float bias) {
  using S = Shape<kDim>;
  float shift[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m)
    shift[m][0] = rows.top[m][0] - bias, shift[m][1] = rows.top[m][1] - bias;
  uint32_t a[2][2][4];  // weights of this step and of the next
#pragma unroll
  for (int at = 0; at < 8; ++at)
    weigh(a[0], at, scores, 0, scale, shift, rows.sum);
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
    for (int pair = 0; pair < S::kDepth; ++pair) {
      uint32_t b[4];
      load_matrices_transposed(b, (v ^ ((pair & 3) << 5)) + ((pair >> 2) << 7) + step * 16 * S::kPitch);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float(&left)[4] = rows.out[m][2 * pair];
        float(&right)[4] = rows.out[m][2 * pair + 1];
        multiply_add(left, a[step % 2][m], b[0], b[1], left);
        multiply_add(right, a[step % 2][m], b[2], b[3], right);
      }
      if (step + 1 < kKeySteps) {
#pragma unroll
        for (int at = 8 * pair / S::kDepth; at < 8 * (pair + 1) / S::kDepth; ++at)
          weigh(a[(step + 1) % 2], at, scores, step + 1, scale, shift, rows.sum);
      }
    }
  }
}

// Divides by the sums and writes out and lse. `place` is where the warp's 32 queries lay in shared memory:
// out passes through it, so that whole rows are written at once.
template <int kDim>
__device__ __forceinline__ void write_rows(const Parameters& p, Rows<kDim>& rows, uint8_t* place, int head,
                                           int first_row) {
  using S = Shape<kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * m + 8 * half + lane / 4;
      float sum = rows.sum[m][half];
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      const float share = sum == 0 ? 0 : 1 / sum;
      if (p.lse != nullptr && lane % 4 == 0 && first_row + row < p.queries)
        p.lse[static_cast<int64_t>(head) * p.queries + first_row + row] =
            sum == 0 ? -INFINITY : (rows.top[m][half] + log2f(sum)) * std::numbers::ln2_v<float>;
      uint8_t* const to = place + row * S::kPitch + 4 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        *reinterpret_cast<uint32_t*>(to + ((n ^ (row & 7)) << 4)) =
            pack_bf16(rows.out[m][n][2 * half] * share, rows.out[m][n][2 * half + 1] * share);
    }
  }
  __syncwarp();
#pragma unroll
  for (int at = lane; at < 32 * S::kChunks; at += 32) {
    const int row = at / S::kChunks, chunk = at % S::kChunks;
    if (first_row + row >= p.queries) continue;
    const uint4 bits = *reinterpret_cast<const uint4*>(place + row * S::kPitch + ((chunk ^ (row & 7)) << 4));
    __nv_bfloat16* const to =
        p.out + (static_cast<int64_t>(first_row + row) * p.heads + head) * kDim + chunk * 8;
    *reinterpret_cast<uint4*>(to) = bits;
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, Shape<kDim>::kBlocksPerMultiprocessor)
    portable_kernel(const __grid_constant__ Parameters p) {
  using S = Shape<kDim>;
  extern __shared__ __align__(1024) uint8_t shared[];
  Span* const spans = reinterpret_cast<Span*>(shared + S::kQueryBytes + S::kPlaces * S::kPlaceBytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int head = static_cast<int>(blockIdx.x) % p.heads;
  const int tile_row = (p.query_tiles - 1 - static_cast<int>(blockIdx.x) / p.heads) * kQueryTile;
  const int last_row = min(tile_row + kQueryTile, p.queries) - 1;
  const auto seen_by = [&](int band, int row) {
    return visible_rows(p.band[band], p.first_query + row, p.doc_start != nullptr ? p.doc_start[row] : 0);
  };

  const uint32_t q_place = shared_offset(shared);
  load_rows<kDim, kQueryTile>(q_place, p.q + (static_cast<int64_t>(tile_row) * p.heads + head) * kDim,
                              static_cast<int64_t>(p.heads) * kDim, p.queries - tile_row);
  if (thread < p.bands) {
    const RowRange first = seen_by(thread, tile_row), last = seen_by(thread, last_row);
    const BandRows& band = p.band[thread];
    const int kv_head = head / p.group;
    spans[thread] = {
        first.begin,    last.end, last.begin, first.end, band.k + kv_head * kDim, band.v + kv_head * kDim,
        band.row_stride};
  }
  __syncthreads();

  // The lane's addresses in the fragments of Q, K and V (mma.cuh), for the first of each.
  const uint32_t q_lane = q_place + (32 * warp + lane % 16) * S::kPitch + (((lane / 16) ^ (lane % 8)) << 4);
  const uint32_t k_lane = (lane / 16 * 8 + lane % 8) * S::kPitch + (((lane / 8 % 2) ^ (lane % 8)) << 4);
  const uint32_t v_lane = (lane % 16) * S::kPitch + (((lane / 16) ^ (lane % 8)) << 4);

  // Place `at` of the ring, after which come those at + 1 and at + 2 in a circle.
  const uint32_t ring = q_place + S::kQueryBytes;
  const auto load = [&](uint32_t place, Cursor at, const __nv_bfloat16* Span::*which) {
    if (at.band < p.bands) {
      const Span& span = spans[at.band];
      load_rows<kDim, kKeyTile>(ring + place, span.*which + at.row * span.row_stride, span.row_stride,
                                span.end - at.row);
    }
    copy_async_commit();  // an empty group too: waiting counts groups
  };
  const auto following = [](uint32_t place) {
    return place == (S::kPlaces - 1) * S::kPlaceBytes ? 0 : place + S::kPlaceBytes;
  };

  Rows<kDim> rows;
  bool careful = false, good = true;
  do {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rows.top[m][half] = kLowest, rows.sum[m][half] = 0;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        rows.out[m][n][0] = rows.out[m][n][1] = rows.out[m][n][2] = rows.out[m][n][3] = 0;
    }

    Cursor at = first_at_or_after({0, spans[0].begin}, spans, p.bands);
    load(0, at, &Span::k);
    load(S::kPlaceBytes, at, &Span::v);
    uint32_t place = 0;   // of the ring, where the next tile of keys or values to be worked on lies
    RowRange seen{0, 0};  // by the warp's query number `lane`, in the band at hand
    float bias = 0;
    bool new_band = true;
    while (at.band < p.bands) {
      if (new_band) {
        seen = seen_by(at.band, min(tile_row + 32 * warp + lane, last_row));
        bias = p.band[at.band].band.stride > 1 && p.landmark_bias != nullptr
                   ? p.landmark_bias[head] * std::numbers::log2e_v<float>
                   : 0;
      }
      const Cursor next = first_at_or_after({at.band, at.row + kKeyTile}, spans, p.bands);

      copy_async_wait<1>();  // this thread's part of K, and behind the barrier everyone's
      __syncthreads();
      // Two places on lie the values of the tile before, which nobody reads any more.
      load(following(following(place)), next, &Span::k);
      Scores scores;
      multiply_keys<kDim>(scores, q_lane, ring + place + k_lane);
      if (at.row < spans[at.band].full_begin || at.row + kKeyTile > spans[at.band].full_end)
        mask(scores, {seen.begin - at.row, seen.end - at.row});
      const bool quick = !careful && anchored(rows);
      if (!quick) raise_maxima(rows, scores, p.scale_log2, bias);

      copy_async_wait<1>();  // V
      __syncthreads();
      load(place, next, &Span::v);  // over the keys just used
      place = following(place);
      multiply_values<kDim>(rows, scores, ring + place + v_lane, p.scale_log2, bias);
      if (quick) good = settle(rows) && good;

      place = following(place);
      new_band = next.band != at.band;
      at = next;
    }
    if (careful) break;
    copy_async_wait<0>();
    careful = __syncthreads_or(!good);
  } while (careful);
  copy_async_wait<0>();  // a block that sees no keys at all still waits for its queries
  __syncthreads();
  write_rows(p, rows, shared + 32 * warp * S::kPitch, head, tile_row + 32 * warp);
}

template <int kDim>
void launch(StreamHandle stream, const Parameters& parameters) {
  using S = Shape<kDim>;
  const int64_t blocks = static_cast<int64_t>(parameters.query_tiles) * parameters.heads;
  check(blocks <= INT32_MAX, "a grid of attention blocks has less than 2^31 of them");
  check_cuda(cudaFuncSetAttribute(portable_kernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  S::kSharedBytes),
             "shared memory of the portable attention kernel");
  portable_kernel<kDim><<<static_cast<unsigned>(blocks), kThreads, S::kSharedBytes, stream>>>(parameters);
  check_launch("attention (portable)", stream);
}

}  // namespace

void attention_portable(StreamHandle stream, const Attention<BFloat16>& problem) {
  check(problem.scale > 0, "the scale of attention scores is positive");
  check(problem.queries <= INT32_MAX - kQueryTile, "a GPU has less than 2^31 queries");
  Parameters p{};
  p.bands = static_cast<int>(problem.bands.size());
  for (size_t b = 0; b < problem.bands.size(); ++b)
    p.band[b] = band_rows(problem.bands[b], problem.kv_heads * problem.head_dim);
  p.queries = static_cast<int>(problem.queries), p.heads = static_cast<int>(problem.heads);
  p.group = static_cast<int>(problem.heads / problem.kv_heads);
  p.query_tiles = (p.queries + kQueryTile - 1) / kQueryTile;
  p.first_query = problem.first_query;
  p.doc_start = problem.doc_start, p.landmark_bias = problem.landmark_bias;
  p.scale_log2 = problem.scale * std::numbers::log2e_v<float>;
  p.q = reinterpret_cast<const __nv_bfloat16*>(problem.q);
  p.out = reinterpret_cast<__nv_bfloat16*>(problem.out);
  p.lse = problem.lse;
  problem.head_dim == 128 ? launch<128>(stream, p) : launch<64>(stream, p);
}

}  // namespace longhalo

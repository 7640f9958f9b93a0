// Prefill. A segment is cut into pieces of about 128 tokens; a block walks one piece and keeps its sums in
// registers, so that k and v are read once. Then the pieces of each segment are merged in order. The pieces
// depend on the stride alone, so a landmark has the same bits wherever a shard or a call begins.
#include <cmath>

#include "device/cuda_check.hpp"
#include "device/device.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/rows.cuh"
#include "kernels/landmark_pool/pool_device.cuh"
#include "kernels/rotary/rotary.hpp"

namespace longhalo {
namespace {

constexpr int kThreads = 128;
constexpr int kPieceTokens = 128;
constexpr int kTableTokens = 32;          // tokens whose turns are in shared memory at once
constexpr int kColumnSums = 32;           // sums that a thread keeps: 16 of k, 16 of v
constexpr int64_t kPortionPieces = 8192;  // pieces between two merges: bounds the workspace

// A segment's pieces are equally long but for the last, and none is empty: a_segment - 1 of at most 128
// tokens are fewer than the stride.
struct Pieces {
  int64_t stride;
  int64_t a_segment;
  int64_t tokens;  // of one piece
};

Pieces pieces_of(int64_t stride) {
  const int64_t a_segment = (stride + kPieceTokens - 1) / kPieceTokens;
  return {stride, a_segment, (stride + a_segment - 1) / a_segment};
}

// Of a segment's first `tokens` tokens.
__host__ __device__ int64_t pieces_begun(const Pieces& pieces, int64_t tokens) {
  return (tokens + pieces.tokens - 1) / pieces.tokens;
}

// The workspace holds for each piece k_sum [H_kv, d], v_sum [H_kv, d], m [H_kv], l [H_kv], padded to 16
// bytes.
int64_t piece_floats(int64_t kv_heads, int64_t head_dim) {
  return (pool_state_floats(kv_heads, head_dim) + 3) / 4 * 4;
}

struct PiecePass {
  int64_t n;
  int64_t first_token;
  int64_t first_segment;  // of this portion, counted from first_token
  Pieces pieces;
  int kv_heads, head_dim;
  int heads_a_block;
  const double* frequencies;
  const float* landmark_query;
  BFloat16* kv;
  float* workspace;
  int64_t piece_floats;
};

// One more column than there are keeps threads that read across the sums out of each other's banks.
__host__ __device__ int lane_sum_slot(int lane, int sum, int columns) {
  return (lane * kColumnSums + sum) * (columns + 1);
}

// Thread = (token lane, head, eight pairs of dimensions): it holds k's eight pairs, c and c + d/2, and the
// same columns of v. Lanes take every lanes-th token.
template <bool kRotate, bool kLearned>
__global__ void __launch_bounds__(kThreads) pool_pieces(PiecePass p) {
  extern __shared__ __align__(
      16) float shared[];  // the turns of some tokens; at the end, the sums of all lanes
  __shared__ float tops[kThreads], weights[kThreads];
  const int64_t segment = p.first_segment + static_cast<int64_t>(blockIdx.x) / p.pieces.a_segment;
  const int64_t piece = static_cast<int64_t>(blockIdx.x) % p.pieces.a_segment;
  const int64_t begin = segment * p.pieces.stride + piece * p.pieces.tokens;
  const int64_t end = min(min(begin + p.pieces.tokens, (segment + 1) * p.pieces.stride), p.n);

  const int half = p.head_dim / 2, head_columns = half / kVectorWidth;
  const int first_head = static_cast<int>(blockIdx.y) * p.heads_a_block;
  const int columns = min(p.heads_a_block, p.kv_heads - first_head) * head_columns;
  const int lanes = kThreads / columns;
  const int lane = static_cast<int>(threadIdx.x) / columns, column = static_cast<int>(threadIdx.x) % columns;
  const int head = first_head + column / head_columns, head_column = column % head_columns;
  const bool active = lane < lanes;
  const int64_t row = int64_t{2} * p.kv_heads * p.head_dim;
  BFloat16* const mine = p.kv + static_cast<int64_t>(head) * p.head_dim + head_column * kVectorWidth;
  const int64_t to_v = static_cast<int64_t>(p.kv_heads) * p.head_dim;

  float u[kLearned ? 16 : 1];
  unsigned head_mask = 0;  // the threads of this head in this warp
  if constexpr (kLearned) {
    const float scale = rsqrtf(static_cast<float>(p.head_dim));
#pragma unroll
    for (int i = 0; i < 16; ++i)
      u[i] = active
                 ? p.landmark_query[head * p.head_dim + head_column * kVectorWidth + i % 8 + i / 8 * half] *
                       scale
                 : 0;
    const int in_warp = static_cast<int>(threadIdx.x) % 32;
    head_mask = head_columns == 32 ? 0xffffffffU
                                   : ((1U << head_columns) - 1U) << (in_warp / head_columns * head_columns);
  }
  float sums[kColumnSums] = {};
  float top = kLearned ? -INFINITY : 0, weight_sum = 0;

  for (int64_t base = begin; base < end; base += kTableTokens) {
    const int tokens = static_cast<int>(min(end - base, static_cast<int64_t>(kTableTokens)));
    if constexpr (kRotate) {
      __syncthreads();  // the turns before these have been read
      for (int at = static_cast<int>(threadIdx.x); at < tokens * half; at += kThreads) {
        const int token = at / half, pair = at % half;
        const auto position = static_cast<double>(p.first_token + base + token);
        set_turn(shared + token * p.head_dim, pair, half, turn_of(position, p.frequencies[pair]));
      }
      __syncthreads();
    }
    if (!active) continue;
    for (int token = lane; token < tokens; token += 2 * lanes) {
      Bf16x8 raw[2][4];  // two tokens on their way at once
      load_token(mine + (base + token) * row, half, to_v, raw[0]);
      const bool two = token + lanes < tokens;
      if (two) load_token(mine + (base + token + lanes) * row, half, to_v, raw[1]);
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        if (which == 1 && !two) break;
        float x[4][kVectorWidth];
#pragma unroll
        for (int part = 0; part < 4; ++part)
          unpack(raw[which][part], x[part]);
        float weight = 1;
        if constexpr (kLearned) {
          float score = 0;
#pragma unroll
          for (int i = 0; i < 16; ++i)
            score += u[i] * x[i / 8][i % 8];
          // The threads of a head are neighbours in a warp and walk the same tokens.
          for (int other = head_columns / 2; other > 0; other /= 2)
            score += __shfl_xor_sync(head_mask, score, other);
          const float higher = fmaxf(top, score);
          const float shrink = __expf(top - higher);
          weight = __expf(score - higher);
          top = higher;
          weight_sum *= shrink;
#pragma unroll
          for (float& sum : sums)
            sum *= shrink;
        }
        weight_sum += weight;
#pragma unroll
        for (int i = 0; i < kColumnSums; ++i)
          sums[i] += kLearned ? weight * x[i / 8][i % 8] : x[i / 8][i % 8];
        if constexpr (kRotate) {
          BFloat16* const at = mine + (base + token + which * lanes) * row;
          float cosine[8], sine[8];
          get_turns(shared + (token + which * lanes) * p.head_dim, head_column, half, cosine, sine);
          turn_pairs(cosine, sine, x[0], x[1]);
          store_vector(at, pack(x[0]));
          store_vector(at + half, pack(x[1]));
        }
      }
    }
  }

  // The lanes become one, in order: each thread first scales its sums to the highest top of its column.
  tops[threadIdx.x] = top;
  __syncthreads();
  float highest = top;
  if constexpr (kLearned) {
    for (int other = 0; active && other < lanes; ++other)
      highest = fmaxf(highest, tops[other * columns + column]);
    const float shrink =
        top == highest ? 1.0F : __expf(top - highest);  // a lane without tokens has sums of 0
    weight_sum *= shrink;
#pragma unroll
    for (float& sum : sums)
      sum *= shrink;
  }
  weights[threadIdx.x] = weight_sum;
  if (active) {
#pragma unroll
    for (int i = 0; i < kColumnSums; ++i)
      shared[lane_sum_slot(lane, i, columns) + column] = sums[i];
  }
  __syncthreads();
  float* const out = p.workspace + static_cast<int64_t>(blockIdx.x) * p.piece_floats;
  for (int at = static_cast<int>(threadIdx.x); at < kColumnSums * columns; at += kThreads) {
    // Neighbouring threads write neighbouring elements: at = (k or v, head of the block, dimension).
    const int of_tensor = columns * 16, tensor = at / of_tensor, element = at % of_tensor;
    const int block_head = element / p.head_dim, dimension = element % p.head_dim;
    const int i = tensor * 16 + dimension / half * 8 + dimension % 8;
    const int from = block_head * head_columns + dimension % half / 8;
    float sum = 0;
    for (int other = 0; other < lanes; ++other)
      sum += shared[lane_sum_slot(other, i, columns) + from];
    out[(tensor * p.kv_heads + first_head) * p.head_dim + element] = sum;
  }
  if (lane == 0 && head_column == 0) {
    float* const state = out + int64_t{2} * p.kv_heads * p.head_dim;
    float sum = 0;
    for (int other = 0; other < lanes; ++other)
      sum += weights[other * columns + column];
    state[head] = highest;
    state[p.kv_heads + head] = sum;
  }
}

struct MergePass {
  int64_t n;
  int64_t first_token;
  int64_t first_segment;
  Pieces pieces;
  int kv_heads, head_dim;
  const double* frequencies;
  PoolBand band;
  const float* workspace;
  int64_t piece_floats;
};

// Block = (segment, head), thread = a column of [k, v]. A segment that n cuts off becomes the open state;
// when none is cut off, the block after the last segment writes the state of a segment without tokens.
__global__ void merge_pieces(MergePass p) {
  __shared__ float exchange[256];
  const int64_t local = blockIdx.x / static_cast<unsigned>(p.kv_heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.kv_heads));
  const int column = static_cast<int>(threadIdx.x);
  const int64_t segment = p.first_segment + local;
  const int64_t tokens = min(p.n - segment * p.pieces.stride, p.pieces.stride);
  const int64_t count = pieces_begun(p.pieces, tokens);
  const float* const first = p.workspace + local * p.pieces.a_segment * p.piece_floats;
  const int64_t own = column < p.head_dim
                          ? static_cast<int64_t>(head) * p.head_dim + column
                          : static_cast<int64_t>(p.kv_heads + head) * p.head_dim + column - p.head_dim;
  const int64_t tops = int64_t{2} * p.kv_heads * p.head_dim + head;
  float top = -INFINITY;
  for (int64_t piece = 0; piece < count; ++piece)
    top = fmaxf(top, first[piece * p.piece_floats + tops]);
  float weight_sum = 0, sum = 0;
#pragma unroll 4
  for (int64_t piece = 0; piece < count; ++piece) {
    const float* const state = first + piece * p.piece_floats;
    const float factor = __expf(state[tops] - top);
    weight_sum += factor * state[tops + p.kv_heads];
    sum += factor * state[own];
  }
  if (tokens == p.pieces.stride) {
    const int64_t global = p.first_token / p.pieces.stride + segment;
    write_landmark(p.band, global, head, p.kv_heads, p.head_dim, p.frequencies, sum / weight_sum, exchange);
    if (p.band.lse != nullptr && column == 0)
      p.band.lse[(global - p.band.first_row) * p.kv_heads + head] = top + logf(weight_sum);
    return;
  }
  const OpenHead open = open_head(p.band.open, head, p.kv_heads, p.head_dim);
  (column < p.head_dim ? open.k_sum[column] : open.v_sum[column - p.head_dim]) = sum;
  if (column == 0) *open.m = top, *open.l = weight_sum;
}

int64_t portion_segments(const Pieces& pieces) {
  return std::max<int64_t>(1, kPortionPieces / pieces.a_segment);
}

void pool_band_pass(StreamHandle stream, const RotateAndPool& keys, const PoolTarget& target, bool rotate,
                    int64_t n, int64_t first_token, BFloat16* kv, float* workspace) {
  PiecePass walk{};
  walk.n = n, walk.first_token = first_token, walk.pieces = pieces_of(target.stride);
  walk.kv_heads = static_cast<int>(keys.kv_heads), walk.head_dim = static_cast<int>(keys.head_dim);
  const int head_columns = walk.head_dim / 2 / kVectorWidth;
  walk.heads_a_block = std::min(walk.kv_heads, kThreads / head_columns);
  walk.frequencies = keys.frequencies, walk.landmark_query = target.landmark_query;
  walk.kv = kv, walk.workspace = workspace;
  walk.piece_floats = piece_floats(keys.kv_heads, keys.head_dim);
  const MergePass merge_all{n,
                            first_token,
                            0,
                            walk.pieces,
                            walk.kv_heads,
                            walk.head_dim,
                            keys.frequencies,
                            pool_band(target),
                            workspace,
                            walk.piece_floats};

  const bool learned = target.landmark_query != nullptr;
  const auto kernel = rotate ? (learned ? pool_pieces<true, true> : pool_pieces<true, false>)
                             : (learned ? pool_pieces<false, true> : pool_pieces<false, false>);
  const auto lane_sums = [](int columns) { return lane_sum_slot(kThreads / columns, 0, columns); };
  const int rest = walk.kv_heads % walk.heads_a_block;  // heads of the last block, where it has fewer
  const int shared_floats =
      std::max({lane_sums(walk.heads_a_block * head_columns), rest > 0 ? lane_sums(rest * head_columns) : 0,
                rotate ? kTableTokens * walk.head_dim : 0});
  const int head_blocks = (walk.kv_heads + walk.heads_a_block - 1) / walk.heads_a_block;
  const int64_t segments = n / target.stride + 1;  // with the open one, which may have no token
  for (int64_t first = 0; first < segments; first += portion_segments(walk.pieces)) {
    const int64_t count = std::min(portion_segments(walk.pieces), segments - first);
    const int64_t whole = std::min(first + count, n / target.stride) - first;
    const int64_t pieces =
        whole * walk.pieces.a_segment +
        (whole < count ? pieces_begun(walk.pieces, n - (first + whole) * target.stride) : 0);
    if (pieces > 0) {
      walk.first_segment = first;
      const dim3 grid(static_cast<unsigned>(pieces), static_cast<unsigned>(head_blocks));
      kernel<<<grid, kThreads, static_cast<size_t>(shared_floats) * sizeof(float), stream>>>(walk);
      check_launch("rotate and pool", stream);
    }
    MergePass merge = merge_all;
    merge.first_segment = first;
    merge_pieces<<<static_cast<unsigned>(count * keys.kv_heads), static_cast<unsigned>(2 * keys.head_dim), 0,
                   stream>>>(merge);
    check_launch("merging pooled pieces", stream);
  }
}

}  // namespace

int64_t rotate_and_pool_workspace(const RotateAndPool& keys, int64_t n) {
  check_pool_shape(keys);
  int64_t most = 0;
  for (const PoolTarget& target : keys.bands) {
    const Pieces pieces = pieces_of(target.stride);
    const int64_t segments = std::min(portion_segments(pieces), (n + target.stride - 1) / target.stride);
    most = std::max(
        most, std::min(segments * pieces.a_segment, (n + pieces.tokens - 1) / pieces.tokens + segments));
  }
  return most * piece_floats(keys.kv_heads, keys.head_dim) * static_cast<int64_t>(sizeof(float));
}

void rotate_and_pool(StreamHandle stream, const RotateAndPool& keys, int64_t n, int64_t first_token,
                     BFloat16* kv, void* workspace) {
  check_pool_arrays(keys);
  check(n >= 0 && first_token >= 0, "token counts and positions are not negative");
  check_aligned(kv);
  check_aligned(workspace);
  for (const PoolTarget& target : keys.bands)
    check(first_token % target.stride == 0, "pooling begins at a multiple of every stride");
  const NvtxRange range("rotate and pool");
  if (keys.bands.empty()) {
    rotary(stream, n, keys.kv_heads, keys.head_dim, keys.frequencies, static_cast<double>(first_token), 1, kv,
           2 * keys.kv_heads * keys.head_dim);
    return;
  }
  // k is pooled as it was before the rotary embedding, so the pass that turns it comes last.
  for (size_t band = keys.bands.size(); band-- > 0;)
    pool_band_pass(stream, keys, keys.bands[band], band == 0, n, first_token, kv,
                   static_cast<float*>(workspace));
}

}  // namespace longhalo

// Decode. One launch of a fixed grid, so that a captured graph serves every step: the position is read on the
// device, and so is decided where segments end. The first blocks feed the open segments, one block a band and
// head, token after token; the others copy the new rows with their keys turned.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/rows.cuh"
#include "kernels/landmark_pool/pool_device.cuh"

namespace longhalo {
namespace {

constexpr int kTokensAtOnce = 32;  // whose weights are alive at once
constexpr int kMaxHeadDim = 256;

struct AppendPass {
  int64_t n;
  const int64_t* position;
  int kv_heads, head_dim;
  const double* frequencies;
  int bands;
  PoolBand band[kMaxBands];
  const BFloat16* new_kv;
  BFloat16* rows;
  int64_t first_row;
};

// Scores u . k / sqrt(d) of `tokens` tokens from x on, a warp for each.
__device__ void score_tokens(const float* u, int head_dim, int tokens, int64_t row, const BFloat16* k,
                             float* scores) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const float scale = rsqrtf(static_cast<float>(head_dim));
  for (int token = warp; token < tokens; token += warps) {
    float score = 0;
    for (int c = lane; c < head_dim; c += 32)
      score += u[c] * scale * to_float_device(k[token * row + c]);
    for (int lanes = 16; lanes > 0; lanes /= 2)
      score += __shfl_xor_sync(0xffffffffU, score, lanes);
    if (lane == 0) scores[token] = score;
  }
}

// Thread c holds column c of [k sums, v sums] (d each) of one head.
__device__ void feed_open_segment(const AppendPass& p, const PoolBand& band, int head) {
  __shared__ float weights[kTokensAtOnce];
  __shared__ float exchange[kMaxHeadDim];
  const int column = static_cast<int>(threadIdx.x), d = p.head_dim;
  const int64_t row = int64_t{2} * p.kv_heads * d;
  const int64_t key_column = static_cast<int64_t>(head) * d;
  const int64_t own_column =
      column < d ? key_column + column : static_cast<int64_t>(p.kv_heads + head) * d + column - d;
  const OpenHead open = open_head(band.open, head, p.kv_heads, d);
  float* const own_sum = column < d ? open.k_sum + column : open.v_sum + column - d;
  float top = *open.m, weight_sum = *open.l, sum = *own_sum;

  const int64_t position = *p.position;
  int64_t segment = position / band.stride;
  int64_t left = (segment + 1) * band.stride - position;  // tokens that the open segment lacks
  for (int64_t token = 0; token < p.n;) {
    const auto tokens = static_cast<int>(min(min(p.n - token, left), static_cast<int64_t>(kTokensAtOnce)));
    const BFloat16* const x = p.new_kv + token * row;
    __syncthreads();  // the weights before these have been read
    if (band.landmark_query != nullptr)
      score_tokens(band.landmark_query + head * d, d, tokens, row, x + key_column, weights);
    else if (column < tokens)
      weights[column] = 0;
    __syncthreads();
    float higher = top;
    for (int at = 0; at < tokens; ++at)
      higher = fmaxf(higher, weights[at]);
    const float shrink = __expf(top - higher);  // an empty segment's top is -infinity, its sums are 0
    top = higher;
    weight_sum *= shrink;
    sum *= shrink;
#pragma unroll 8
    for (int at = 0; at < tokens; ++at) {
      const float weight = __expf(weights[at] - top);
      weight_sum += weight;
      sum += weight * to_float_device(x[at * row + own_column]);
    }
    token += tokens;
    left -= tokens;
    if (left > 0) continue;
    write_landmark(band, segment, head, p.kv_heads, d, p.frequencies, sum / weight_sum, exchange);
    top = -INFINITY, weight_sum = 0, sum = 0;
    ++segment;
    left = band.stride;
  }
  *own_sum = sum;
  if (column == 0) *open.m = top, *open.l = weight_sum;
}

// Thread = (token, head, eight pairs).
__device__ void copy_rows(const AppendPass& p, int64_t item) {
  const int half = p.head_dim / 2, head_columns = half / kVectorWidth;
  const int token_items = p.kv_heads * head_columns;
  const int64_t token = item / token_items;
  if (token >= p.n) return;
  const int rest = static_cast<int>(item % token_items);
  const int pair = rest % head_columns * kVectorWidth;
  const int64_t row = int64_t{2} * p.kv_heads * p.head_dim, to_v = row / 2;
  const int64_t position = *p.position + token;
  const int64_t column = static_cast<int64_t>(rest / head_columns) * p.head_dim + pair;
  const BFloat16* const from = p.new_kv + token * row + column;
  BFloat16* const to = p.rows + (position - p.first_row) * row + column;
  Bf16x8 raw[4];
  load_token(from, half, to_v, raw);
  store_vector(to + to_v, raw[2]);
  store_vector(to + to_v + half, raw[3]);
  float cosine[8], sine[8], a[8], b[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 turn = turn_of(static_cast<double>(position), p.frequencies[pair + i]);
    cosine[i] = turn.x, sine[i] = turn.y;
  }
  unpack(raw[0], a);
  unpack(raw[1], b);
  turn_pairs(cosine, sine, a, b);
  store_vector(to, pack(a));
  store_vector(to + half, pack(b));
}

__global__ void __launch_bounds__(2 * kMaxHeadDim) append_keys_kernel(AppendPass p) {
  const auto block = static_cast<int64_t>(blockIdx.x);
  const int64_t pool_blocks = static_cast<int64_t>(p.bands) * p.kv_heads;
  if (block < pool_blocks)
    feed_open_segment(p, p.band[block / p.kv_heads], static_cast<int>(block % p.kv_heads));
  else
    copy_rows(p, (block - pool_blocks) * blockDim.x + threadIdx.x);
}

}  // namespace

void append_keys(StreamHandle stream, const RotateAndPool& keys, int64_t n, const int64_t* position,
                 const BFloat16* new_kv, BFloat16* rows, int64_t first_row) {
  check_pool_arrays(keys);
  if (n == 0) return;
  check(n > 0 && position != nullptr, "append_keys has tokens and a position");
  check_aligned(new_kv);
  check_aligned(rows);
  const NvtxRange range("append keys");
  AppendPass p{};
  p.n = n, p.position = position;
  p.kv_heads = static_cast<int>(keys.kv_heads), p.head_dim = static_cast<int>(keys.head_dim);
  p.frequencies = keys.frequencies, p.bands = static_cast<int>(keys.bands.size());
  for (size_t band = 0; band < keys.bands.size(); ++band)
    p.band[band] = pool_band(keys.bands[band]);
  p.new_kv = new_kv, p.rows = rows, p.first_row = first_row;
  const int64_t threads = 2 * keys.head_dim;
  const int64_t items = n * keys.kv_heads * (keys.head_dim / 2 / kVectorWidth);
  const int64_t blocks = p.bands * keys.kv_heads + (items + threads - 1) / threads;
  check(blocks <= std::numeric_limits<int32_t>::max(), "the tokens of one call fit one grid");
  append_keys_kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream>>>(p);
  check_launch("append keys", stream);
}

}  // namespace longhalo

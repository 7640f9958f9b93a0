// The gradient of rotate_and_pool(). First, for each segment and head, sum a g and the landmark key's
// gradient turned back, in place. Then one pass over the tokens: what the landmarks say of each is added to
// its own gradient, k's is turned back, and both are rounded to bf16.
//
// Threads hold the same columns of a token as in the forward pass (rotate_and_pool.cu): eight pairs of k and
// of its gradient, and the same columns of v. All lanes of a warp take part in every step, those without a
// token with one that counts for nothing.
#include <algorithm>
#include <array>
#include <cmath>

#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/add_parts.hpp"
#include "kernels/common/rows.cuh"
#include "kernels/landmark_pool/pool_device.cuh"

namespace longhalo {
namespace {

constexpr int kThreads = 128;
constexpr int kTableTokens = 32;  // tokens whose turns are in shared memory at once
constexpr int64_t kMaxBlocks = 1024;
constexpr unsigned kWholeWarp = 0xffffffffU;

struct Segments {
  int64_t first_segment, stride;  // global
  int kv_heads, head_dim;
  const double* frequencies;
  const BFloat16* landmarks;
  float* d_landmarks;
  float* inner;  // [segments, H_kv]
};

// One warp a (segment, head): d_kbar . kbar is the same before and after both are turned.
__global__ void __launch_bounds__(32) segment_gradients(Segments p) {
  const int64_t segment = blockIdx.x / static_cast<unsigned>(p.kv_heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.kv_heads)), half = p.head_dim / 2;
  const int64_t key = (segment * 2 * p.kv_heads + head) * p.head_dim;
  const int64_t value = key + static_cast<int64_t>(p.kv_heads) * p.head_dim;
  const double centre =
      static_cast<double>((p.first_segment + segment) * p.stride) + static_cast<double>(p.stride - 1) * 0.5;
  float sum = 0;
  for (int pair = static_cast<int>(threadIdx.x); pair < half; pair += 32) {
    float* const d = p.d_landmarks + key + pair;
    const float first = d[0], second = d[half];
    sum = fmaf(first, to_float_device(p.landmarks[key + pair]), sum);
    sum = fmaf(second, to_float_device(p.landmarks[key + pair + half]), sum);
    for (int64_t at : {value + pair, value + pair + half})
      sum = fmaf(p.d_landmarks[at], to_float_device(p.landmarks[at]), sum);
    const float2 turn = turn_of(centre, p.frequencies[pair]);
    d[0] = first * turn.x + second * turn.y;
    d[half] = second * turn.x - first * turn.y;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    sum += __shfl_xor_sync(kWholeWarp, sum, lanes);
  if (threadIdx.x == 0) p.inner[segment * p.kv_heads + head] = sum;
}

struct BandGradients {
  int stride;
  int segments;  // whole ones
  const float *u, *lse, *inner, *d_landmarks;
  float* partial;  // [blocks, H_kv, d], or nullptr
};

struct TokenPass {
  int n;
  int tokens_a_block;  // a multiple of kTableTokens
  int64_t first_token;
  int kv_heads, head_dim, heads_a_block;
  const double* frequencies;
  BandGradients band[kMaxBands];
  const BFloat16* kv;
  const float* d_rotated;
  BFloat16* d_kv;
};

// Sixteen numbers of a head: eight pairs, c and c + d/2.
__device__ inline void load_pairs(const float* at, int half, float (&to)[2][8]) {
  load_vector(at, to[0]);
  load_vector(at + half, to[1]);
}

template <int kBands>
__global__ void __launch_bounds__(kThreads) token_gradients(TokenPass p) {
  extern __shared__ __align__(16) float shared[];  // turns of some tokens; at the end, sums of all lanes
  const int half = p.head_dim / 2, head_columns = half / kVectorWidth;
  const int first_head = static_cast<int>(blockIdx.y) * p.heads_a_block;
  const int columns = min(p.heads_a_block, p.kv_heads - first_head) * head_columns;
  const int lanes = kThreads / columns;
  const int lane = static_cast<int>(threadIdx.x) / columns, column = static_cast<int>(threadIdx.x) % columns;
  const int head = first_head + column / head_columns, head_column = column % head_columns;
  const int width = p.kv_heads * p.head_dim;
  const int place = head * p.head_dim + head_column * kVectorWidth;  // of the first number in [H_kv, d]
  const float root = rsqrtf(static_cast<float>(p.head_dim));
  const int begin = static_cast<int>(blockIdx.x) * p.tokens_a_block, end = min(begin + p.tokens_a_block, p.n);
  float d_u[kBands > 0 ? kBands : 1][2][8] = {};

  for (int base = begin; base < end; base += kTableTokens) {
    const int tokens = min(end - base, kTableTokens);
    __syncthreads();  // the turns before these have been read
    for (int at = static_cast<int>(threadIdx.x); at < tokens * half; at += kThreads) {
      const int token = at / half, pair = at % half;
      const auto position = static_cast<double>(p.first_token + base + token);
      set_turn(shared + token * p.head_dim, pair, half, turn_of(position, p.frequencies[pair]));
    }
    __syncthreads();
    for (int round = 0; round * lanes < tokens; ++round) {
      const int own = round * lanes + lane;
      const bool there = lane < lanes && own < tokens;
      const int in_table = there ? own : 0, token = base + in_table;
      const int64_t row = int64_t{2} * token * width + place;
      Bf16x8 raw[4];
      load_token(p.kv + row, half, width, raw);
      float dk[2][8], dv[2][8], k[2][8], v[2][8], cosine[8], sine[8];
      load_pairs(p.d_rotated + row, half, dk);
      load_pairs(p.d_rotated + row + width, half, dv);
      unpack(raw[0], k[0]);
      unpack(raw[1], k[1]);
      unpack(raw[2], v[0]);
      unpack(raw[3], v[1]);
      get_turns(shared + in_table * p.head_dim, head_column, half, cosine, sine);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        sine[i] = -sine[i];
      turn_pairs(cosine, sine, k[0], k[1]);
      turn_pairs(cosine, sine, dk[0], dk[1]);
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
        const BandGradients& band = p.band[b];
        const int segment = token / band.stride;
        const bool pooled = there && segment < band.segments;
        const int known = segment < band.segments ? segment : 0;
        const float* const landmark = band.d_landmarks + int64_t{2} * known * width + place;
        float d_kbar[2][8], d_vbar[2][8], u[2][8] = {};
        load_pairs(landmark, half, d_kbar);
        load_pairs(landmark + width, half, d_vbar);
        if (band.u != nullptr) load_pairs(band.u + place, half, u);
        float score = 0, g = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          score = fmaf(u[i / 8][i % 8], k[i / 8][i % 8], score);
          g = fmaf(d_kbar[i / 8][i % 8], k[i / 8][i % 8], g);
          g = fmaf(d_vbar[i / 8][i % 8], v[i / 8][i % 8], g);
        }
        for (int other = head_columns / 2; other > 0; other /= 2) {
          score += __shfl_xor_sync(kWholeWarp, score, other);
          g += __shfl_xor_sync(kWholeWarp, g, other);
        }
        const int at = known * p.kv_heads + head;
        const float a = pooled ? __expf(fmaf(score, root, -band.lse[at])) : 0;
        const float d_score = pooled ? a * (g - band.inner[at]) * root : 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float &to_k = dk[i / 8][i % 8], &to_v = dv[i / 8][i % 8];
          to_k = fmaf(a, d_kbar[i / 8][i % 8], fmaf(d_score, u[i / 8][i % 8], to_k));
          to_v = fmaf(a, d_vbar[i / 8][i % 8], to_v);
          d_u[b][i / 8][i % 8] = fmaf(d_score, k[i / 8][i % 8], d_u[b][i / 8][i % 8]);
        }
      }
      if (!there) continue;
      BFloat16* const to = p.d_kv + row;
      store_vector(to, pack(dk[0]));
      store_vector(to + half, pack(dk[1]));
      store_vector(to + width, pack(dv[0]));
      store_vector(to + width + half, pack(dv[1]));
    }
  }

  // Lanes become one, in order.
#pragma unroll
  for (int b = 0; b < kBands; ++b) {
    if (p.band[b].partial == nullptr) continue;
    __syncthreads();
    if (lane < lanes) {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        shared[i * kThreads + lane * columns + column] = d_u[b][i / 8][i % 8];
    }
    __syncthreads();
    if (lane > 0) continue;
    float* const to = p.band[b].partial + static_cast<int64_t>(blockIdx.x) * width + place;
    for (int i = 0; i < 16; ++i) {
      float sum = 0;
      for (int other = 0; other < lanes; ++other)
        sum += shared[i * kThreads + other * columns + column];
      to[i / 8 * half + i % 8] = sum;
    }
  }
}

// Tokens and blocks by the shape alone: sums have the same order on every GPU.
struct Deal {
  explicit Deal(int64_t n)
      : tokens_a_block(
            std::max<int64_t>(1, (n + kMaxBlocks * kTableTokens - 1) / (kMaxBlocks * kTableTokens)) *
            kTableTokens),
        blocks((n + tokens_a_block - 1) / tokens_a_block) {}
  int64_t tokens_a_block, blocks;
};

int64_t inner_floats(const RotateAndPoolBackward& keys, const PoolGradient& band, int64_t n) {
  return n / band.stride * keys.kv_heads;
}

void check_pool_gradient(const RotateAndPoolBackward& keys, int64_t n) {
  std::array<PoolTarget, kMaxBands> bands{};
  check(keys.bands.size() <= bands.size(), "at most 4 bands are pooled");
  for (size_t b = 0; b < keys.bands.size(); ++b)
    bands[b].stride = keys.bands[b].stride;
  check_pool_shape({keys.kv_heads, keys.head_dim, keys.frequencies, {bands.data(), keys.bands.size()}});
  check(n >= 0 && n <= INT32_MAX - kTableTokens * kMaxBlocks, "a GPU has less than 2^31 tokens");
}

}  // namespace

int64_t rotate_and_pool_backward_workspace(const RotateAndPoolBackward& keys, int64_t n) {
  check_pool_gradient(keys, n);
  int64_t floats = 0;
  for (const PoolGradient& band : keys.bands) {
    floats += inner_floats(keys, band, n);
    if (band.d_landmark_query != nullptr) floats += Deal(n).blocks * keys.kv_heads * keys.head_dim;
  }
  return floats * int64_t{sizeof(float)};
}

void rotate_and_pool_backward(StreamHandle stream, const RotateAndPoolBackward& keys, int64_t n,
                              int64_t first_token, const BFloat16* kv, const float* d_rotated, BFloat16* d_kv,
                              void* workspace) {
  check_pool_gradient(keys, n);
  check(first_token >= 0, "positions are not negative");
  if (n == 0) return;
  check_aligned(kv);
  check_aligned(d_rotated);
  check_aligned(d_kv);
  const NvtxRange range("rotate and pool's gradient");
  const Deal deal(n);
  TokenPass p{};
  p.n = static_cast<int>(n), p.tokens_a_block = static_cast<int>(deal.tokens_a_block);
  p.first_token = first_token;
  p.kv_heads = static_cast<int>(keys.kv_heads), p.head_dim = static_cast<int>(keys.head_dim);
  const int head_columns = p.head_dim / 2 / kVectorWidth;
  p.heads_a_block = std::min(p.kv_heads, kThreads / head_columns);
  p.frequencies = keys.frequencies;
  p.kv = kv, p.d_rotated = d_rotated, p.d_kv = d_kv;
  auto* floats = static_cast<float*>(workspace);
  for (size_t b = 0; b < keys.bands.size(); ++b) {
    const PoolGradient& band = keys.bands[b];
    check(first_token % band.stride == 0, "pooling begins at a multiple of every stride");
    const int64_t segments = n / band.stride;
    check(segments == 0 || (band.landmarks != nullptr && band.lse != nullptr && band.d_landmarks != nullptr),
          "the gradient of landmarks needs them, their sums and their gradient");
    check_aligned(band.d_landmarks);
    // Bands without a whole segment read nothing; a valid address stands for theirs.
    p.band[b] = {static_cast<int>(std::min<int64_t>(band.stride, INT32_MAX)),
                 static_cast<int>(segments),
                 band.landmark_query,
                 band.lse,
                 floats,
                 segments > 0 ? band.d_landmarks : d_rotated,
                 nullptr};
    if (segments > 0) {
      check(segments * keys.kv_heads <= INT32_MAX, "segments of one call fit one grid");
      segment_gradients<<<static_cast<unsigned>(segments * keys.kv_heads), 32, 0, stream>>>(
          {first_token / band.stride, band.stride, p.kv_heads, p.head_dim, keys.frequencies, band.landmarks,
           band.d_landmarks, floats});
      check_launch("gradients of segments", stream);
    }
    floats += inner_floats(keys, band, n);
    if (band.d_landmark_query != nullptr) {
      p.band[b].partial = floats;
      floats += deal.blocks * keys.kv_heads * keys.head_dim;
    }
  }
  constexpr std::array kKernels{token_gradients<0>, token_gradients<1>, token_gradients<2>,
                                token_gradients<3>, token_gradients<4>};
  const int shared_floats = std::max(kTableTokens * p.head_dim, 16 * kThreads);
  const dim3 grid(static_cast<unsigned>(deal.blocks),
                  static_cast<unsigned>((p.kv_heads + p.heads_a_block - 1) / p.heads_a_block));
  kKernels[keys.bands.size()]<<<grid, kThreads, static_cast<size_t>(shared_floats) * sizeof(float), stream>>>(
      p);
  check_launch("rotate and pool's gradient", stream);
  for (size_t b = 0; b < keys.bands.size(); ++b)
    if (p.band[b].partial != nullptr)
      add_parts(stream, p.band[b].partial, deal.blocks, keys.kv_heads * keys.head_dim,
                keys.bands[b].d_landmark_query);
}

}  // namespace longhalo

#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/rotation.cuh"
#include "kernels/common/rows.cuh"
#include "kernels/rotary/rotary.hpp"

namespace longhalo {
namespace {

constexpr int kThreads = 256;
constexpr int kItems = 4;          // (token, head, eight pairs) that a thread loads before it turns the first
constexpr int kTablePairs = 2048;  // turns that fit a block's table
constexpr int kMaxHalf = kTablePairs;

struct RotaryProblem {
  int64_t n;
  int heads, half;
  int tokens_a_block;
  const double* frequencies;
  double first_position, step;
  const int64_t* position;
  float cosines, sines;  // what these are multiplied with
  BFloat16* x;
  int64_t row_stride;
};

__global__ void __launch_bounds__(kThreads) rotary_tokens(RotaryProblem p) {
  __shared__ __align__(16) float turns[2 * kTablePairs];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.tokens_a_block;
  const int tokens = static_cast<int>(min(static_cast<int64_t>(p.tokens_a_block), p.n - first));
  const int columns = p.half / kVectorWidth, token_items = p.heads * columns;
  const int items = tokens * token_items;

  const auto place = [&](int item) {
    const int token = item / token_items, rest = item % token_items;
    return p.x + (first + token) * p.row_stride + static_cast<int64_t>(rest / columns) * 2 * p.half +
           rest % columns * kVectorWidth;
  };
  Bf16x8 low[kItems], high[kItems];
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = begin + i * kThreads + static_cast<int>(threadIdx.x);
      if (item >= items) continue;
      const BFloat16* at = place(item);
      low[i] = load_vector(at);
      high[i] = load_vector(at + p.half);
    }
  };
  load(0);  // on their way while the turns are made

  const double start = p.first_position + (p.position != nullptr ? static_cast<double>(*p.position) : 0.0);
  for (int at = static_cast<int>(threadIdx.x); at < tokens * p.half; at += kThreads) {
    const int token = at / p.half, pair = at % p.half;
    const double position = start + static_cast<double>(first + token) * p.step;
    const float2 turn = turn_of(position, p.frequencies[pair]);
    set_turn(turns + token * 2 * p.half, pair, p.half, make_float2(p.cosines * turn.x, p.sines * turn.y));
  }
  __syncthreads();

  for (int begin = 0; begin < items; begin += kItems * kThreads) {
    if (begin > 0) load(begin);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = begin + i * kThreads + static_cast<int>(threadIdx.x);
      if (item >= items) continue;
      float cosine[8], sine[8], a[8], b[8];
      get_turns(turns + item / token_items * 2 * p.half, item % columns, p.half, cosine, sine);
      unpack(low[i], a);
      unpack(high[i], b);
      turn_pairs(cosine, sine, a, b);
      BFloat16* at = place(item);
      store_vector(at, pack(a));
      store_vector(at + p.half, pack(b));
    }
  }
}

}  // namespace

void rotary(StreamHandle stream, int64_t n, int64_t heads, int64_t head_dim, const double* frequencies,
            double first_position, double step, BFloat16* x, int64_t row_stride, const int64_t* position,
            RotaryDirection direction, float factor) {
  if (n == 0) return;
  check(n > 0 && heads > 0 && head_dim > 0 && head_dim % 16 == 0 && head_dim / 2 <= kMaxHalf,
        "the head dimension is a multiple of 16 up to 4096");
  check(row_stride >= heads * head_dim && row_stride % kVectorWidth == 0 &&
            heads * head_dim <= (int64_t{1} << 24),
        "rows of heads do not overlap and begin at multiples of 8 elements");
  check_aligned(x);
  const NvtxRange range("rotary");
  RotaryProblem p;
  p.n = n, p.heads = static_cast<int>(heads), p.half = static_cast<int>(head_dim / 2);
  const int token_items = p.heads * p.half / kVectorWidth;
  p.tokens_a_block = std::max(1, std::min(kItems * kThreads / token_items, kTablePairs / p.half));
  p.frequencies = frequencies, p.first_position = first_position, p.step = step, p.position = position;
  p.cosines = factor, p.sines = direction == RotaryDirection::kForward ? factor : -factor;
  p.x = x, p.row_stride = row_stride;
  const int64_t blocks = (n + p.tokens_a_block - 1) / p.tokens_a_block;
  check(blocks <= std::numeric_limits<int32_t>::max(), "the rows of one call fit one grid");
  rotary_tokens<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  check_launch("rotary", stream);
}

}  // namespace longhalo

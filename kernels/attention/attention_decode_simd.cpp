#include "kernels/attention/attention_decode.hpp"
#include "kernels/common/simd.hpp"

namespace longhalo::LONGHALO_ISA {
namespace {

constexpr int64_t kColumns =
    4;  // vectors of the head dimension that a pass over the values keeps in registers

int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

/// scores[row + r][j] = q[row + r] . k for kRows rows and one key.
template <int kRows>
LONGHALO_INLINE void score_rows(const DecodePart& p, int64_t row, const float* k, int64_t j) {
  const float* q = p.q + row * p.d;
  Float sums[kRows] = {};
  int64_t c = 0;
  for (; c + kLanes <= p.d; c += kLanes) {
    const Float key = load(k + c);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
      sums[r] += key * load(q + r * p.d + c);
  }
  if (c < p.d) {
    const Float key = load_part(k + c, p.d - c);
    for (int r = 0; r < kRows; ++r)
      sums[r] += key * load_part(q + r * p.d + c, p.d - c);
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
    p.scores[(row + r) * kDecodeTile + j] = sum_lanes(sums[r]);
}

/// All scores of a tile of keys. The values will be wanted next, so they are fetched from memory meanwhile.
void score_tile(const DecodePart& p, const float* k, const float* v, int64_t keys) {
  const int64_t stride = p.kv_heads * p.d;
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t c = 0; c < stride; c += 16)
      __builtin_prefetch(v + j * stride + c);
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      const float* key = k + j * stride + h * p.d;
      const int64_t end = (h + 1) * p.rows;
      int64_t row = h * p.rows;
      for (; row + 4 <= end; row += 4)
        score_rows<4>(p, row, key, j);
      if (end - row == 3) score_rows<3>(p, row, key, j);
      if (end - row == 2) score_rows<2>(p, row, key, j);
      if (end - row == 1) score_rows<1>(p, row, key, j);
    }
  }
}

/// out[row + r] += sum over keys [begin, end) of the tile of weight * v, for kRows rows.
template <int kRows>
LONGHALO_INLINE void weigh_rows(const DecodePart& p, int64_t row, const float* v, int64_t begin,
                                int64_t end) {
  const int64_t stride = p.kv_heads * p.d;
  const float* weight = p.scores + row * kDecodeTile;
  float* out = p.out + row * p.d;
  int64_t c = 0;
  for (; c + kColumns * kLanes <= p.d; c += kColumns * kLanes) {
    Float sums[kRows][kColumns];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kColumns; ++i)
        sums[r][i] = load(out + r * p.d + c + i * kLanes);
    for (int64_t j = begin; j < end; ++j) {
      Float value[kColumns];
#pragma GCC unroll 4
      for (int i = 0; i < kColumns; ++i)
        value[i] = load(v + j * stride + c + i * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < kColumns; ++i)
          sums[r][i] += value[i] * weight[r * kDecodeTile + j];
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kColumns; ++i)
        store(out + r * p.d + c + i * kLanes, sums[r][i]);
  }
  for (; c < p.d; c += kLanes) {
    for (int r = 0; r < kRows; ++r) {
      Float sum = load_part(out + r * p.d + c, p.d - c);
      for (int64_t j = begin; j < end; ++j)
        sum += load_part(v + j * stride + c, p.d - c) * weight[r * kDecodeTile + j];
      store_part(out + r * p.d + c, p.d - c, sum);
    }
  }
}

/// Scores of one row to weights, in place; only keys [begin, end) of the tile exist for it.
void softmax_row(const DecodePart& p, int64_t row, int64_t begin, int64_t end) {
  float* s = p.scores + row * kDecodeTile;
  const float bias = p.bias != nullptr ? p.bias[row] : 0.0F;
  float top = p.top[row];
  for (int64_t j = begin; j < end; ++j) {
    s[j] += bias;
    top = s[j] > top ? s[j] : top;
  }
  for (int64_t j = 0; j < begin; ++j)
    s[j] = -__builtin_inff();
  for (int64_t j = end; j < kDecodeTile; ++j)
    s[j] = -__builtin_inff();
  const float safe = top == -__builtin_inff() ? 0.0F : top;  // the row has seen nothing yet
  if (top != p.top[row]) {
    const float shrink = exp2_lanes(splat(p.top[row] - safe))[0];
    p.sum[row] *= shrink;
    for (int64_t c = 0; c < p.d; ++c)
      p.out[row * p.d + c] *= shrink;
    p.top[row] = top;
  }
  Float sum{};
  for (int64_t j = 0; j < kDecodeTile; j += kLanes) {
    const Float weight = exp2_lanes(load(s + j) - safe);
    sum += weight;
    store(s + j, weight);
  }
  p.sum[row] += sum_lanes(sum);
}

/// One KV head's share of the values of a tile of keys; keys [all_begin, all_end) of it are seen by every
/// row.
void weigh_head(const DecodePart& p, int64_t h, const float* v, int64_t all_begin, int64_t all_end) {
  const int64_t end = (h + 1) * p.rows;
  int64_t row = h * p.rows;
  for (; row + 4 <= end; row += 4)
    weigh_rows<4>(p, row, v, all_begin, all_end);
  if (end - row == 3) weigh_rows<3>(p, row, v, all_begin, all_end);
  if (end - row == 2) weigh_rows<2>(p, row, v, all_begin, all_end);
  if (end - row == 1) weigh_rows<1>(p, row, v, all_begin, all_end);
}

void run(const DecodePart& p) {
  const int64_t all_rows = p.kv_heads * p.rows, stride = p.kv_heads * p.d;
  for (int64_t r = 0; r < all_rows; ++r) {
    p.top[r] = -__builtin_inff();
    p.sum[r] = 0;
    for (int64_t c = 0; c < p.d; ++c)
      p.out[r * p.d + c] = 0;
  }
  for (int64_t key = p.begin; key < p.end; key += kDecodeTile) {
    const int64_t keys = p.end - key < kDecodeTile ? p.end - key : kDecodeTile;
    const float* v = p.v + key * stride;
    score_tile(p, p.k + key * stride, v, keys);

    // Keys of this tile that every row sees; those beside them are weighed row by row, because the value of a
    // key that a row does not see may be anything, NaN included.
    int64_t all_begin = 0, all_end = keys;
    for (int64_t r = 0; r < p.rows; ++r) {
      const int64_t begin = clamp(p.row_begin[r] - key, 0, keys),
                    end = clamp(p.row_end[r] - key, begin, keys);
      for (int64_t h = 0; h < p.kv_heads; ++h)
        softmax_row(p, h * p.rows + r, begin, end);
      all_begin = begin > all_begin ? begin : all_begin;
      all_end = end < all_end ? end : all_end;
    }
    if (all_begin >= all_end) all_begin = all_end = keys;
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      for (int64_t r = 0; r < p.rows && (all_begin > 0 || all_end < keys); ++r) {
        const int64_t begin = clamp(p.row_begin[r] - key, 0, keys),
                      end = clamp(p.row_end[r] - key, begin, keys);
        const int64_t row = h * p.rows + r;
        if (begin < all_begin) weigh_rows<1>(p, row, v + h * p.d, begin, end < all_begin ? end : all_begin);
        if (all_end < end) weigh_rows<1>(p, row, v + h * p.d, begin > all_end ? begin : all_end, end);
      }
      weigh_head(p, h, v + h * p.d, all_begin, all_end);
    }
  }
}

}  // namespace

extern const AttentionDecodeKernels attention_decode{run};

}  // namespace longhalo::LONGHALO_ISA

#include "kernels/attention/attention_decode.hpp"
#include "kernels/common/simd.hpp"

namespace longhalo::LONGHALO_ISA {
namespace {

constexpr int kColumns = 4;  // vectors of the head dimension that a pass over the values keeps in registers

int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

/// scores[r][j] = q[row + r] . k[j] for kRows rows and keys [0, keys) from `k` on.
template <int kRows>
LONGHALO_INLINE void score_rows(const DecodePart& p, int64_t row, const float* k, int64_t keys) {
  const float* q = p.q + row * p.d;
  for (int64_t j = 0; j < keys; ++j) {
    Float sums[kRows] = {};
    int64_t c = 0;
    for (; c + kLanes <= p.d; c += kLanes) {
      const Float key = load(k + j * p.stride + c);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
        sums[r] += key * load(q + r * p.d + c);
    }
    if (c < p.d) {
      const Float key = load_part(k + j * p.stride + c, p.d - c);
      for (int r = 0; r < kRows; ++r)
        sums[r] += key * load_part(q + r * p.d + c, p.d - c);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
      p.scores[(row + r) * kDecodeTile + j] = sum_lanes(sums[r]);
  }
}

/// out[row + r] += sum over keys [begin, end) of the tile of weight * v, for kRows rows.
template <int kRows>
LONGHALO_INLINE void weigh_rows(const DecodePart& p, int64_t row, const float* v, int64_t begin,
                                int64_t end) {
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
        value[i] = load(v + j * p.stride + c + i * kLanes);
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
        sum += load_part(v + j * p.stride + c, p.d - c) * weight[r * kDecodeTile + j];
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

void run(const DecodePart& p) {
  for (int64_t r = 0; r < p.rows; ++r) {
    p.top[r] = -__builtin_inff();
    p.sum[r] = 0;
    for (int64_t c = 0; c < p.d; ++c)
      p.out[r * p.d + c] = 0;
  }
  for (int64_t key = p.begin; key < p.end; key += kDecodeTile) {
    const int64_t keys = p.end - key < kDecodeTile ? p.end - key : kDecodeTile;
    const float* k = p.k + key * p.stride;
    const float* v = p.v + key * p.stride;
    int64_t row = 0;
    for (; row + 4 <= p.rows; row += 4)
      score_rows<4>(p, row, k, keys);
    if (p.rows - row == 3) score_rows<3>(p, row, k, keys);
    if (p.rows - row == 2) score_rows<2>(p, row, k, keys);
    if (p.rows - row == 1) score_rows<1>(p, row, k, keys);

    // Keys of this tile that every row sees; those beside them are weighed row by row, because the value of a
    // key that a row does not see may be anything, NaN included.
    int64_t all_begin = 0, all_end = keys;
    for (int64_t r = 0; r < p.rows; ++r) {
      const int64_t begin = clamp(p.row_begin[r] - key, 0, keys),
                    end = clamp(p.row_end[r] - key, begin, keys);
      softmax_row(p, r, begin, end);
      all_begin = begin > all_begin ? begin : all_begin;
      all_end = end < all_end ? end : all_end;
    }
    if (all_begin >= all_end) all_begin = all_end = keys;
    for (int64_t r = 0; r < p.rows && (all_begin > 0 || all_end < keys); ++r) {
      const int64_t begin = clamp(p.row_begin[r] - key, 0, keys),
                    end = clamp(p.row_end[r] - key, begin, keys);
      if (begin < all_begin) weigh_rows<1>(p, r, v, begin, end < all_begin ? end : all_begin);
      if (all_end < end) weigh_rows<1>(p, r, v, all_end, end);
    }
    row = 0;
    for (; row + 4 <= p.rows; row += 4)
      weigh_rows<4>(p, row, v, all_begin, all_end);
    if (p.rows - row == 3) weigh_rows<3>(p, row, v, all_begin, all_end);
    if (p.rows - row == 2) weigh_rows<2>(p, row, v, all_begin, all_end);
    if (p.rows - row == 1) weigh_rows<1>(p, row, v, all_begin, all_end);
  }
}

}  // namespace

extern const AttentionDecodeKernels attention_decode{run};

}  // namespace longhalo::LONGHALO_ISA

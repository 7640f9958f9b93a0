#include "kernels/attention/attention_gradient_tile.hpp"
#include "kernels/attention/attention_products.hpp"

namespace longhalo::LONGHALO_ISA {
namespace {

// Keys and vectors of the head dimension that the sums over rows keep in registers.
#if defined(__AVX512F__)
constexpr int kKeys = 8, kColumns = 2;
#else
constexpr int kKeys = 6, kColumns = 2;
#endif
static_assert(kKeys <= kGradientSpare && kStep <= kGradientSpare);

// One row block against one key tile: keys [begin, end) of the tile are seen by some row, [all_begin,
// all_end) by all; begin == all_begin == end where none is.
struct BlockTask {
  int64_t d, width;
  const GradientScratch* scratch;
  int64_t row;
  const float* bias;
  int64_t begin, end, all_begin, all_end;
  bool edges() const { return all_begin > begin || all_end < end; }
};

// p = exp(score - lse)
void weights(const BlockTask& task) {
  const GradientScratch& s = *task.scratch;
  Float start[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    start[v] = -load(s.lse + task.row + v * kLanes);
    if (task.bias != nullptr) start[v] += load(task.bias + v * kLanes);
  }
  for (int64_t j = task.begin; j < task.end; j += kStep) {
    Accumulators sums;
    for (int m = 0; m < kStep; ++m)
      for (int v = 0; v < kVectors; ++v)
        sums.at[m][v] = start[v];
    multiply(task.d, s.k + j * task.d, task.d, 1, s.q_lanes + task.row * task.d, kBlock, sums);
#pragma GCC unroll 8
    for (int m = 0; m < kStep; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        store(s.p + (j + m) * kBlock + v * kLanes, exp2_lanes(sums.at[m][v]));
  }
}

// p = 0 where a row does not see a key.
void hide(const BlockTask& task, const GradientKeys& keys) {
  alignas(64) int32_t begin[kBlock], end[kBlock];
  for (int64_t r = 0; r < kBlock; ++r) {
    begin[r] = static_cast<int32_t>(clamp(keys.begin[task.row + r] - keys.first, 0, kGradientKeyTile));
    end[r] = static_cast<int32_t>(clamp(keys.end[task.row + r] - keys.first, 0, kGradientKeyTile));
  }
  for (int64_t j = task.begin; j < task.end; ++j) {
    if (j == task.all_begin && task.all_begin < task.all_end) j = task.all_end;
    if (j >= task.end) break;
    const Int key = splat(static_cast<int32_t>(j));
    for (int v = 0; v < kVectors; ++v) {
      float* p = task.scratch->p + j * kBlock + v * kLanes;
      const Int visible = (key >= load(begin + v * kLanes)) & (key < load(end + v * kLanes));
      store(p, visible ? load(p) : Float{});
    }
  }
}

// ds = p * (d_out . v - D), and 0 where p is 0, whatever stands in a value that a row does not see.
void score_gradients(const BlockTask& task) {
  const GradientScratch& s = *task.scratch;
  Float start[kVectors];
  for (int v = 0; v < kVectors; ++v)
    start[v] = -load(s.inner + task.row + v * kLanes);
  for (int64_t j = task.begin; j < task.end; j += kStep) {
    Accumulators sums;
    for (int m = 0; m < kStep; ++m)
      for (int v = 0; v < kVectors; ++v)
        sums.at[m][v] = start[v];
    multiply(task.d, s.v + j * task.d, task.d, 1, s.d_out_lanes + task.row * task.d, kBlock, sums);
#pragma GCC unroll 8
    for (int m = 0; m < kStep; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = (j + m) * kBlock + v * kLanes;
        const Float p = load(s.p + at), ds = p * sums.at[m][v];
        store(s.ds + at, p == 0.0F ? Float{} : ds);
      }
  }
}

// The last step of a sum over rows takes keys behind the last one: they give 0.
void clear_behind(float* x, int64_t end) {
  for (int64_t at = end * kBlock; at < (end + kGradientSpare) * kBlock; at += kLanes)
    store(x + at, Float{});
}

void sum_bias(const BlockTask& task) {
  const GradientScratch& s = *task.scratch;
  for (int v = 0; v < kVectors; ++v) {
    Float sum = load(s.d_bias + task.row + v * kLanes);
    for (int64_t j = task.begin; j < task.end; ++j)
      sum += load(s.ds + j * kBlock + v * kLanes);
    store(s.d_bias + task.row + v * kLanes, sum);
  }
}

// to[j] += sum over the rows of the block of weight[j][row] * x[row], for every key j of the task.
void sum_over_rows(const BlockTask& task, const float* weight, const float* x, float* to) {
  for (int64_t j = task.begin; j < task.end; j += kKeys) {
    for (int64_t c = 0; c < task.width; c += kColumns * kLanes) {
      Sums<kKeys, kColumns> sums;
#pragma GCC unroll 8
      for (int m = 0; m < kKeys; ++m)
#pragma GCC unroll 8
        for (int v = 0; v < kColumns; ++v)
          sums.at[m][v] = load(to + (j + m) * task.width + c + v * kLanes);
      multiply(kBlock, weight + j * kBlock, kBlock, 1, x + c, task.width, sums);
#pragma GCC unroll 8
      for (int m = 0; m < kKeys; ++m)
#pragma GCC unroll 8
        for (int v = 0; v < kColumns; ++v)
          store(to + (j + m) * task.width + c + v * kLanes, sums.at[m][v]);
    }
  }
}

// dq += ds k
void sum_over_keys(const BlockTask& task) {
  const GradientScratch& s = *task.scratch;
  const int64_t d = task.d;
  int64_t all_begin = task.all_begin, all_end = task.all_end;
  if (all_begin >= all_end) all_begin = all_end = task.end;
  for (int64_t c = 0; c < d; c += kStep) {
    Accumulators sums;
    float* dq = s.dq_lanes + task.row * d + c * kBlock;
#pragma GCC unroll 8
    for (int m = 0; m < kStep; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        sums.at[m][v] = load(dq + m * kBlock + v * kLanes);
    const float* key = s.k + c;
    multiply_seen(all_begin - task.begin, key + task.begin * d, 1, d, s.ds + task.begin * kBlock, sums);
    multiply(all_end - all_begin, key + all_begin * d, 1, d, s.ds + all_begin * kBlock, kBlock, sums);
    multiply_seen(task.end - all_end, key + all_end * d, 1, d, s.ds + all_end * kBlock, sums);
#pragma GCC unroll 8
    for (int m = 0; m < kStep; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        store(dq + m * kBlock + v * kLanes, sums.at[m][v]);
  }
}

void clear(int64_t count, float* x) {
  for (int64_t at = 0; at < count; at += kLanes)
    store(x + at, Float{});
}

void run(const GradientTile& tile, const GradientKeys& keys) {
  const GradientScratch& scratch = tile.scratch;
  const int64_t count = keys.count;
  copy_rows(count, tile.head_dim, keys.k + keys.first * keys.stride, keys.stride, scratch.k);
  copy_rows(count, tile.head_dim, keys.v + keys.first * keys.stride, keys.stride, scratch.v);
  clear((kGradientKeyTile + kGradientSpare) * tile.width, scratch.dk);
  clear((kGradientKeyTile + kGradientSpare) * tile.width, scratch.dv);
  for (int64_t row = 0; row < tile.rows; row += kBlock) {
    const Seen seen = seen_by_block(keys.begin + row, keys.end + row);
    if (seen.any_begin >= keys.first + count || seen.any_end <= keys.first) continue;
    const BlockTask task{tile.head_dim,
                         tile.width,
                         &scratch,
                         row,
                         keys.bias != nullptr ? keys.bias + row : nullptr,
                         clamp(seen.any_begin, keys.first, keys.first + count) - keys.first,
                         clamp(seen.any_end, keys.first, keys.first + count) - keys.first,
                         clamp(seen.all_begin, keys.first, keys.first + count) - keys.first,
                         clamp(seen.all_end, keys.first, keys.first + count) - keys.first};
    weights(task);
    if (task.edges()) hide(task, keys);
    score_gradients(task);
    clear_behind(scratch.p, task.end);
    clear_behind(scratch.ds, task.end);
    if (keys.sum_bias) sum_bias(task);
    sum_over_rows(task, scratch.p, scratch.d_out_rows + row * tile.width, scratch.dv);
    sum_over_rows(task, scratch.ds, scratch.q_rows + row * tile.width, scratch.dk);
    sum_over_keys(task);
  }
}

}  // namespace

extern const AttentionGradientKernels attention_gradient{kBlock, kColumns* kLanes, run};

}  // namespace longhalo::LONGHALO_ISA

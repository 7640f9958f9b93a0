#include "kernels/attention/attention_products.hpp"

namespace longhalo::LONGHALO_ISA {
namespace {

// One row block against one key tile: keys [begin, end) of the tile are seen by some row, [all_begin,
// all_end) by all.
struct BlockTask {
  int64_t d;
  const float* q;
  float* out;
  float* top;
  float* sum;
  const float* bias;
  const TileScratch* scratch;
  int64_t begin, end, all_begin, all_end;
};

void scores(const BlockTask& task) {
  Float bias[kVectors] = {};
  if (task.bias != nullptr)
    for (int v = 0; v < kVectors; ++v)
      bias[v] = load(task.bias + v * kLanes);
  for (int64_t j = task.begin; j < task.end; j += kStep) {
    Accumulators sums;
    for (int m = 0; m < kStep; ++m)
      for (int v = 0; v < kVectors; ++v)
        sums.at[m][v] = bias[v];
    multiply(task.d, task.scratch->k + j * task.d, task.d, 1, task.q, kBlock, sums);
    float* p = task.scratch->p + j * kBlock;
#pragma GCC unroll 8
    for (int m = 0; m < kStep; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        store(p + m * kBlock + v * kLanes, sums.at[m][v]);
  }
}

void hide(const BlockTask& task, const TileBand& band, int64_t first_row, int64_t tile_begin) {
  const Float minus_infinity = splat(-__builtin_inff());
  alignas(64) int32_t begin[kBlock], end[kBlock];
  for (int64_t r = 0; r < kBlock; ++r) {
    begin[r] = static_cast<int32_t>(clamp(band.begin[first_row + r] - tile_begin, 0, kKeyTile));
    end[r] = static_cast<int32_t>(clamp(band.end[first_row + r] - tile_begin, 0, kKeyTile));
  }
  for (int64_t j = task.begin; j < task.end; ++j) {
    if (j == task.all_begin && task.all_begin < task.all_end) j = task.all_end;
    if (j >= task.end) break;
    const Int key = splat(static_cast<int32_t>(j));
    for (int v = 0; v < kVectors; ++v) {
      float* p = task.scratch->p + j * kBlock + v * kLanes;
      const Int visible = (key >= load(begin + v * kLanes)) & (key < load(end + v * kLanes));
      store(p, visible ? load(p) : minus_infinity);
    }
  }
}

void softmax(const BlockTask& task) {
  const float minus_infinity = -__builtin_inff();
  float* const p = task.scratch->p;
  Float top[kVectors], safe[kVectors], sum[kVectors];
  for (int v = 0; v < kVectors; ++v)
    top[v] = load(task.top + v * kLanes);
  for (int64_t j = task.begin; j < task.end; ++j)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      top[v] = max(top[v], load(p + j * kBlock + v * kLanes));
  Int changed{};
  Float shrink[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const Float before = load(task.top + v * kLanes);
    changed |= before != top[v];
    safe[v] = top[v] == minus_infinity ? Float{} : top[v];  // a row that has seen nothing yet
    shrink[v] = exp2_lanes(before - safe[v]);
    sum[v] = load(task.sum + v * kLanes);
  }
  if (any(changed)) {
    for (int v = 0; v < kVectors; ++v) {
      sum[v] *= shrink[v];
      store(task.top + v * kLanes, top[v]);
    }
    for (int64_t c = 0; c < task.d; ++c)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        float* out = task.out + c * kBlock + v * kLanes;
        store(out, load(out) * shrink[v]);
      }
  }
  for (int64_t j = task.begin; j < task.end; ++j)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* at = p + j * kBlock + v * kLanes;
      const Float weight = exp2_lanes(load(at) - safe[v]);
      sum[v] += weight;
      store(at, weight);
    }
  for (int v = 0; v < kVectors; ++v)
    store(task.sum + v * kLanes, sum[v]);
}

void weigh_values(const BlockTask& task) {
  const int64_t d = task.d;
  const float* const p = task.scratch->p;
  for (int64_t c = 0; c < d; c += kStep) {
    Accumulators sums;
    float* out = task.out + c * kBlock;
#pragma GCC unroll 8
    for (int m = 0; m < kStep; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        sums.at[m][v] = load(out + m * kBlock + v * kLanes);
    const float* value = task.scratch->v + c;
    int64_t all_begin = task.all_begin, all_end = task.all_end;
    if (all_begin >= all_end) all_begin = all_end = task.end;
    multiply_seen(all_begin - task.begin, value + task.begin * d, 1, d, p + task.begin * kBlock, sums);
    multiply(all_end - all_begin, value + all_begin * d, 1, d, p + all_begin * kBlock, kBlock, sums);
    multiply_seen(task.end - all_end, value + all_end * d, 1, d, p + all_end * kBlock, sums);
#pragma GCC unroll 8
    for (int m = 0; m < kStep; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        store(out + m * kBlock + v * kLanes, sums.at[m][v]);
  }
}

void run(const AttentionTile& tile) {
  const int64_t d = tile.head_dim;
  const TileScratch& scratch = tile.scratch;
  for (int b = 0; b < tile.bands; ++b) {
    const TileBand& band = tile.band[b];
    int64_t begin = INT64_MAX, end = INT64_MIN;
    for (int64_t row = 0; row < tile.rows; row += kBlock) {
      const Seen seen = seen_by_block(band.begin + row, band.end + row);
      if (seen.any_begin < begin) begin = seen.any_begin;
      if (seen.any_end > end) end = seen.any_end;
    }
    for (int64_t key = begin; key < end; key += kKeyTile) {
      const int64_t count = end - key < kKeyTile ? end - key : kKeyTile;
      copy_rows(count, d, band.k + key * band.stride, band.stride, scratch.k);
      copy_rows(count, d, band.v + key * band.stride, band.stride, scratch.v);
      for (int64_t row = 0; row < tile.rows; row += kBlock) {
        const Seen seen = seen_by_block(band.begin + row, band.end + row);
        if (seen.any_begin >= key + count || seen.any_end <= key) continue;
        const BlockTask task{d,
                             scratch.q + row * d,
                             scratch.out + row * d,
                             scratch.top + row,
                             scratch.sum + row,
                             band.bias != nullptr ? band.bias + row : nullptr,
                             &scratch,
                             clamp(seen.any_begin - key, 0, count),
                             clamp(seen.any_end - key, 0, count),
                             seen.all_begin < key ? 0 : clamp(seen.all_begin - key, 0, count),
                             seen.all_end < key ? 0 : clamp(seen.all_end - key, 0, count)};
        scores(task);
        if (task.all_begin > task.begin || task.all_end < task.end) hide(task, band, row, key);
        softmax(task);
        weigh_values(task);
      }
    }
  }
}

}  // namespace

extern const AttentionTileKernels attention_tile{kBlock, run};

}  // namespace longhalo::LONGHALO_ISA

// One tile of attention's backward pass: as in attention_tile.hpp the queries of a few neighbouring positions
// for ONE KV head, all heads of its group together, against one key tile of one band. Rows (query, head in
// the group) are the lanes where products are summed over the head dimension or over keys (scores, d_out . v,
// dq); the head dimension is the lanes where they are summed over rows (dk, dv). That takes q and d_out in
// both layouts, and again no key is ever transposed.
//
// Plain data, filled in by attention_backward_cpu.cpp and worked on by attention_gradient_simd.cpp.
#pragma once

#include <cstdint>

#include "kernels/attention/bands.hpp"
#include "kernels/common/isa.hpp"

namespace longhalo {

inline constexpr int64_t kGradientKeyTile = 64;  // keys whose weights and score gradients are alive at once
inline constexpr int64_t kGradientSpare = 8;     // rows behind a key tile that the last step may touch

/// Scratch of one thread, with room for `rows` rows (a multiple of the row block), head dimension d, and
/// `width`: d rounded up to the column block.
struct GradientScratch {
  float* q_lanes;      // [rows / block][d][block] q * scale * log2(e)
  float* d_out_lanes;  // [rows / block][d][block]
  float* dq_lanes;     // [rows / block][d][block] sums of ds * k
  float* q_rows;       // [rows][width] q, zeros behind d
  float* d_out_rows;   // [rows][width] zeros behind d
  float* lse;          // [rows] in units of log2; infinity for a row that takes no part
  float* inner;        // [rows] D = sum of out * d_out
  float* d_bias;       // [rows] sums of ds over strided bands
  float* k;            // [kGradientKeyTile + spare][d]
  float* v;            // [kGradientKeyTile + spare][d]
  float* dk;           // [kGradientKeyTile + spare][width] sums of ds * q
  float* dv;           // [kGradientKeyTile + spare][width] sums of p * d_out
  float* p;            // [kGradientKeyTile + spare][block]
  float* ds;           // [kGradientKeyTile + spare][block]
};

struct GradientTile {
  int64_t rows;  // a multiple of the row block; rows that are no query's have q and d_out 0 and lse infinity
  int64_t head_dim;
  int64_t width;
  GradientScratch scratch;
};

/// One key tile for this tile's KV head; row r starts at k + r * stride.
struct GradientKeys {
  const float* k;
  const float* v;
  int64_t stride;        // floats from one key to the next
  int64_t first, count;  // the tile holds the band's key rows [first, first + count)
  const int64_t* begin;  // [rows] first key row of the band that each row sees
  const int64_t* end;    // [rows] one past the last; not above begin: it sees none
  const float* bias;     // [rows] added to the scores, in units of log2; nullptr for none
  bool sum_bias;         // whether d_bias takes these keys' ds
};

struct AttentionGradientKernels {
  int row_block;
  int column_block;
  /// Sets scratch.dk and dv (of this tile of queries alone), adds to dq_lanes and d_bias.
  void (*run)(const GradientTile& tile, const GradientKeys& keys);
};

LONGHALO_DECLARE_SIMD(AttentionGradientKernels, attention_gradient)

}  // namespace longhalo

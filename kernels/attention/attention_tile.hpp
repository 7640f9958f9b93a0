// One tile of attention: the queries of a few neighbouring positions for ONE KV head, all heads of its group
// together, against every band. The rows (query, head in the group) are the lanes of the vectors, so that
// each key and each value is read once for the whole group, the softmax needs no sums across lanes, and no
// key is ever transposed.
//
// Everything here is plain data, filled in by attention_cpu.cpp and worked on by attention_tile_simd.cpp.
#pragma once

#include <cstdint>

#include "kernels/attention/bands.hpp"
#include "kernels/common/isa.hpp"

namespace longhalo {

inline constexpr int64_t kKeyTile = 128;     // keys whose scores are alive at once
inline constexpr int64_t kMaxRowBlock = 64;  // rows that one pass of the inner loops takes, at most

/// Keys and values of one band for this tile's KV head; row r starts at k + r * stride.
struct TileBand {
  const float* k;
  const float* v;
  int64_t stride;        // floats from one key to the next
  const int64_t* begin;  // [rows] first key row that each row sees
  const int64_t* end;    // [rows] one past the last; not above begin: it sees none
  const float* bias;     // [rows] added to the scores, in units of log2; nullptr for none
};

/// Scratch of one thread, with room for `rows` rows (a multiple of the row block) and head dimension d.
struct TileScratch {
  float* q;    // [rows / block][d][block] q * scale * log2(e)
  float* out;  // [rows / block][d][block] sums of p * v
  float* top;  // [rows] running maximum of the scores, in units of log2
  float* sum;  // [rows] running sum of p
  float* k;    // [kKeyTile + 8][d]
  float* v;    // [kKeyTile][d]
  float* p;    // [kKeyTile + 8][block] scores, then weights
};

struct AttentionTile {
  int64_t rows;  // a multiple of the row block; the caller ignores rows beyond its own
  int64_t head_dim;
  int bands;
  TileBand band[kMaxBands];
  TileScratch scratch;
};

struct AttentionTileKernels {
  int row_block;
  void (*run)(const AttentionTile& tile);
};

LONGHALO_DECLARE_SIMD(AttentionTileKernels, attention_tile)

}  // namespace longhalo

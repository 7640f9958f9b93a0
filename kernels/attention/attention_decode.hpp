// Attention of a few queries (decode): bound by reading the keys and values, not by arithmetic, so the
// vectors run along the head dimension, each key is read once for all heads of its group, and the keys are
// split into parts that threads take. The parts depend on the problem alone and are merged in order: any
// number of threads, same bits.
#pragma once

#include <cstdint>

#include "kernels/attention/attention.hpp"
#include "kernels/common/isa.hpp"

namespace longhalo {

inline constexpr int64_t kDecodeQueries = 8;  // up to this many queries take this path
inline constexpr int64_t kDecodeTile = 64;    // keys whose scores are alive at once

/// Keys [begin, end) of one band for one KV head, and the rows (query, head of the group) that may see them.
struct DecodePart {
  int64_t rows, d;
  const float* q;  // [rows, d] q * scale * log2(e)
  const float* k;  // key r at k + r * stride
  const float* v;
  int64_t stride;
  int64_t begin, end;
  const int64_t* row_begin;  // [rows] the keys that each row sees; end not above begin: none
  const int64_t* row_end;
  const float* bias;  // [rows] in units of log2, or nullptr
  float* scores;      // scratch [rows, kDecodeTile]
  float* out;         // [rows, d] sums of p * v
  float* top;         // [rows] maximum, in units of log2
  float* sum;         // [rows] sum of p
};

struct AttentionDecodeKernels {
  void (*run)(const DecodePart& part);  // sets out, top and sum
};

LONGHALO_DECLARE_SIMD(AttentionDecodeKernels, attention_decode)

/// attention_forward() for p.queries <= kDecodeQueries; p has been checked.
void attention_decode_forward(const Attention<float>& p);

}  // namespace longhalo

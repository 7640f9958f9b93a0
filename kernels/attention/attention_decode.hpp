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

/// Keys [begin, end) of one band, all KV heads: a key's heads lie beside each other in memory, so that the
/// keys are read from front to back. A KV head's rows are its (query, head of the group) pairs.
struct DecodePart {
  int64_t kv_heads, rows, d;
  const float* q;  // [H_kv, rows, d] q * scale * log2(e)
  const float* k;  // [.., H_kv, d]
  const float* v;  // [.., H_kv, d]
  int64_t begin, end;
  const int64_t* row_begin;  // [rows] the keys that each row sees; end not above begin: none
  const int64_t* row_end;
  const float* bias;  // [H_kv, rows] in units of log2, or nullptr
  float* scores;      // scratch [H_kv, rows, kDecodeTile]
  float* out;         // [H_kv, rows, d] sums of p * v
  float* top;         // [H_kv, rows] maximum, in units of log2
  float* sum;         // [H_kv, rows] sum of p
};

struct AttentionDecodeKernels {
  void (*run)(const DecodePart& part);  // sets out, top and sum
};

LONGHALO_DECLARE_SIMD(AttentionDecodeKernels, attention_decode)

/// attention_forward() for p.queries <= kDecodeQueries; p has been checked.
void attention_decode_forward(const Attention<float>& p);

}  // namespace longhalo

// A band's keys on the device: which rows of its arrays a query sees. The same arithmetic as bands.hpp, which
// says what the conditions mean; the tests compare both with the definition. Device code only.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "core/error.hpp"
#include "kernels/attention/attention.hpp"

namespace longhalo {

struct BandRows {
  Band band;
  const __nv_bfloat16* k;  // [count, H_kv, d]
  const __nv_bfloat16* v;
  int64_t first_key;
  int64_t row_stride;  // elements
  int count;
};

/// On the host. Rows are counted in 32 bits.
inline BandRows band_rows(const BandKeys<BFloat16>& keys, int64_t width) {
  check(keys.count <= INT32_MAX / 2, "a GPU has less than 2^30 keys in a band");
  return {keys.band,
          reinterpret_cast<const __nv_bfloat16*>(keys.k),
          reinterpret_cast<const __nv_bfloat16*>(keys.v),
          keys.first_key,
          keys.row_stride != 0 ? keys.row_stride : width,
          static_cast<int>(keys.count)};
}

/// Rows [begin, end) of the band's arrays.
struct RowRange {
  int begin, end;
};

/// a / b for a >= 0, b > 0; 64-bit division is slow.
__device__ inline int64_t divide(int64_t a, int64_t b) {
  if (a < b) return 0;
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

/// What query position `i` sees. Both ends grow with i and doc_start. Cost: two divisions unless the stride
/// is 1.
__device__ inline RowRange visible_rows(const BandRows& rows, int64_t i, int64_t doc_start) {
  const int64_t s = rows.band.stride, near = rows.band.near, far = rows.band.far;
  const int64_t newest = i - (near > s - 1 ? near : s - 1);  // the latest first token of a segment seen
  const int64_t oldest = far > i ? 0 : i - far + 1;          // the oldest last token of one
  const int64_t in_document = doc_start + s - 1;             // divided by s: the segments begun after it
  int64_t begin = oldest > in_document ? oldest : in_document;
  int64_t end = newest < 0 ? 0 : newest + s;
  if (s > 1) begin = divide(begin, s), end = divide(end, s);
  begin -= rows.first_key, end -= rows.first_key;
  const int64_t count = rows.count;
  end = end < 0 ? 0 : end > count ? count : end;
  begin = begin < 0 ? 0 : begin > end ? end : begin;
  return {static_cast<int>(begin), static_cast<int>(end)};
}

}  // namespace longhalo

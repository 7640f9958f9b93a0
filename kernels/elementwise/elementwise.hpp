// Small operations on whole arrays in device memory, most of them for gradients: sums, scales, conversions,
// and the squared norm. n of any size; all are queued on `stream`. Pointers 16-byte aligned where n exceeds
// 8, unless said otherwise.
#pragma once

#include <cstdint>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"

namespace longhalo {

/// to = from, rounded to nearest, ties to even; and exactly. Bytes: 6 * n.
void convert(StreamHandle stream, int64_t n, const float* from, BFloat16* to);
void convert(StreamHandle stream, int64_t n, const BFloat16* from, float* to);

/// to += from. Bytes: 12 * n, 10 * n, 6 * n.
void add(StreamHandle stream, int64_t n, const float* from, float* to);
void add(StreamHandle stream, int64_t n, const BFloat16* from, float* to);
void add(StreamHandle stream, int64_t n, const BFloat16* from, BFloat16* to);

/// to [n, width] += row [width], to each of its rows; width a multiple of 8. Bytes: 4 * n * width.
void add_to_rows(StreamHandle stream, int64_t n, int64_t width, const BFloat16* row, BFloat16* to);

/// x *= factor. Bytes: 8 * n.
void scale(StreamHandle stream, int64_t n, float factor, float* x);

/// *sum (device memory) = sum of x^2, in double and in an order that depends on n alone; not finite when an
/// x is not. `workspace`: kSquaredNormBytes. Bytes: 4 * n.
void squared_norm(StreamHandle stream, int64_t n, const float* x, double* sum, void* workspace);
inline constexpr int64_t kSquaredNormBytes = int64_t{1024} * 8;

}  // namespace longhalo

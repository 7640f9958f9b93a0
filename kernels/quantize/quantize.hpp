// bf16 rows to rows of eight bits: e4m3, each row scaled so that its largest magnitude is 448 (or somewhat
// less, for the least error); or int8 after a Hadamard transform of blocks of 64, the largest at 127. Rounded
// to nearest even.
// A row of zeros (or of magnitudes below 2^-110, whose scale would leave fp32) has scale 0 and values 0. What
// is not finite is not hidden: a row that holds an infinity becomes NaN, a NaN stays NaN, and in int8 makes
// its row NaN (as do sums of 64 numbers that leave fp32).
#pragma once

#include <cstdint>

#include "device/stream_handle.hpp"
#include "kernels/common/fp8.hpp"
#include "kernels/common/int8.hpp"

namespace longhalo {

/// GPU. x [n, width] -> out; width a multiple of 8, x 16-byte aligned, out.values 8-byte. Bytes: 3 * n *
/// width, and 2 * n * width more beyond a width of 32768.
void quantize_rows(StreamHandle stream, int64_t n, int64_t width, const BFloat16* x, const Fp8Rows& out);
/// The same to int8; width a multiple of 64.
void quantize_rows(StreamHandle stream, int64_t n, int64_t width, const BFloat16* x, const Int8Rows& out);

/// To fp8, but of 16 scales, the one above and up to twice as large in steps of 2^(1/16), each row gets the
/// one with the least squared error. The distance of e4m3 numbers doubles at each power of two, so what lies
/// just below one is rounded best, and a scale may bring much of a row there: normally distributed rows of
/// 576 to 1536 numbers err by 4 to 6% less. For weights: 16 roundings of each number are too slow for
/// activations.
void quantize_rows_least_error(StreamHandle stream, int64_t n, int64_t width, const BFloat16* x,
                               const Fp8Rows& out);

}  // namespace longhalo

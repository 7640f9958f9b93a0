// Matrix products of int8 rows on Hopper's tensor cores: c = a W^T, with a scale a row of a (token) and a row
// of W (output channel). Sums are exact, in 32 bits; the epilogue scales them and adds the residual stream.
#pragma once

#include <cstdint>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"
#include "kernels/common/int8.hpp"
#include "kernels/matmul/matmul.hpp"

namespace longhalo {

/// The longest sum of products of two numbers up to 127 that 32 bits hold, in whole blocks of 128.
constexpr int64_t kLongestInt8Sum = 133120;

/// a [m, in], w [out, in], c [m, out], dense; c = sum (a.scale w.scale), rounded to bf16, which kAdd then
/// adds to c: the same bits on every run and for every m. in a multiple of 16 up to kLongestInt8Sum, out of
/// 8; values and c 16-byte aligned; c must not overlap the others. Compute capability 9.0.
void int8_matmul_hopper(StreamHandle stream, int64_t m, int64_t out, int64_t in, const ConstInt8Rows& a,
                        const ConstInt8Rows& w, BFloat16* c, Accumulate accumulate);

}  // namespace longhalo

// Weights in e4m3, rounded for what they will multiply instead of each number to the nearest.
//
// Rounding W by D changes a product x W^T by x D^T, which for inputs of covariance C has the mean square
//     E = sum over rows d of D of  d C d^T.
// Inputs are correlated, so the errors of a row can undo each other. Coordinate descent: column after column,
// each number goes to the e4m3 number that makes E least while all others stay, a few times over, from
// quantize_rows_least_error() on; the scales remain. Costs nothing where the weights are used.
//
// C is an estimate from some thousand inputs, often fewer than it has columns, and tokens come that are like
// none of them. So it is shrunk half the way to the identity (Ledoit and Wolf 2004 on why): what is used is C
// + c I, to a factor of two, with c the mean of C's diagonal. Shrunk to its diagonal instead, it lets weights
// whose inputs hardly vary among these tokens go anywhere, and a model read by others falls apart.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/common/fp8.hpp"
#include "kernels/matmul/device_matmul.hpp"

namespace longhalo {

/// GPU, queued on the stream of `matmul`, `stream`. Of the rows x [n, width], n > 0: their mean [width],
/// rounded to bf16, and covariance [width, width], their covariance about it with the diagonal doubled. width
/// a multiple of 8, x 16-byte aligned. Temporary: 4 * width^2 + 2 * n * width bytes.
void mean_and_covariance(DeviceMatmul& matmul, StreamHandle stream, int64_t n, int64_t width,
                         const BFloat16* x, BFloat16* mean, BFloat16* covariance);

/// GPU. w [n, width], covariance [width, width] as above -> out, without a mean; out's outliers are columns
/// that it has twice, the second time behind the others. n and width multiples of 16, 16-byte aligned.
/// Numbers stay as rounded to nearest where the covariance is 0 or not finite. Temporary: 6 or, with
/// outliers, 7 * n * width bytes, and 128 * n. Time: that of some passes over them for every 64 columns.
void quantize_rows_for_inputs(DeviceMatmul& matmul, StreamHandle stream, int64_t n, int64_t width,
                              const BFloat16* w, const BFloat16* covariance, const Fp8Rows& out);

/// GPU, the same w and covariance: the `count` columns c through which rounding inputs costs a product most,
/// those of largest variance[c] * |w[:, c]|^2, in ascending order. The host waits.
std::vector<int32_t> find_outliers(StreamHandle stream, int64_t n, int64_t width, const BFloat16* w,
                                   const BFloat16* covariance, int64_t count);

}  // namespace longhalo

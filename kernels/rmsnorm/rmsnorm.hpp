// RMSNorm: out = x / sqrt(mean(x^2) + epsilon) * weight, over each row.
#pragma once

#include <cstdint>

#include "device/stream_handle.hpp"
#include "kernels/common/fp8.hpp"
#include "kernels/common/int8.hpp"

namespace longhalo {

/// x, out [n, D], weight [D]; out may be x.
void rmsnorm(int64_t n, int64_t hidden, const float* x, const float* weight, float epsilon, float* out);
void rmsnorm_reference(int64_t n, int64_t hidden, const double* x, const double* weight, double epsilon,
                       double* out);

/// The gradient: with r = 1 / sqrt(mean(x^2) + epsilon) of a row,
///     dx += r (weight d_out - x r^2 mean(x weight d_out)),   d_weight += sum over rows of x r d_out.
/// x, d_out, dx [n, D]; weight, d_weight [D]. dx is ADDED into, since the residual stream's gradient goes
/// past the norm beside this one; d_out must not overlap it. d_weight is added into, its sums over rows are
/// made in double; bitwise the same for any number of threads.
void rmsnorm_backward(int64_t n, int64_t hidden, const float* x, const float* weight, float epsilon,
                      const float* d_out, float* dx, float* d_weight);
void rmsnorm_backward_reference(int64_t n, int64_t hidden, const double* x, const double* weight,
                                double epsilon, const double* d_out, double* dx, double* d_weight);

/// GPU: x [n, D] read once (twice beyond D = 32768), out written once; weight and sums in fp32; out may be x.
/// hidden a multiple of 8; arrays 16-byte aligned.
void rmsnorm(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, const float* weight,
             float epsilon, BFloat16* out);
/// GPU, and the result quantised in the same pass, from fp32 (quantize.hpp says how).
void rmsnorm(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, const float* weight,
             float epsilon, const Fp8Rows& out);
void rmsnorm(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, const float* weight,
             float epsilon, const Int8Rows& out);

/// GPU: the gradient, as on the CPU, of bf16 rows with sums in fp32: dx [n, D] (ADDED into, and rounded to
/// bf16 again) and d_weight [D] (added into; over rows in a fixed order). hidden up to 16384. `workspace`:
/// rmsnorm_backward_workspace() bytes, at most 4096 * D. Bytes: 8 * n * D.
void rmsnorm_backward(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, const float* weight,
                      float epsilon, const BFloat16* d_out, BFloat16* dx, float* d_weight, void* workspace);
int64_t rmsnorm_backward_workspace(int64_t n, int64_t hidden);

}  // namespace longhalo

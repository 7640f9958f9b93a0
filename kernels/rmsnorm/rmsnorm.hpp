// RMSNorm: out = x / sqrt(mean(x^2) + epsilon) * weight, over each row.
#pragma once

#include <cstdint>

#include "device/stream_handle.hpp"
#include "kernels/common/fp8.hpp"

namespace longhalo {

/// x, out [n, D], weight [D]; out may be x.
void rmsnorm(int64_t n, int64_t hidden, const float* x, const float* weight, float epsilon, float* out);
void rmsnorm_reference(int64_t n, int64_t hidden, const double* x, const double* weight, double epsilon,
                       double* out);

/// GPU: x [n, D] read once (twice beyond D = 32768), out written once; weight and sums in fp32; out may be x.
/// hidden a multiple of 8; arrays 16-byte aligned.
void rmsnorm(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, const float* weight,
             float epsilon, BFloat16* out);
/// GPU, and the result quantised in the same pass, from fp32 (quantize.hpp says how).
void rmsnorm(StreamHandle stream, int64_t n, int64_t hidden, const BFloat16* x, const float* weight,
             float epsilon, const Fp8Rows& out);

}  // namespace longhalo

// Matrix products with a weight in the Hugging Face layout, W [out, in]: c = a W^T, by OpenBLAS on the CPU.
#pragma once

#include <cstdint>

namespace longhalo {

enum class Accumulate { kOverwrite, kAdd };

/// a [m, in], w [out, in], c [m, out], all row-major and dense. kAdd adds to c (the residual stream, fused).
/// m up to 4 (decode) runs as matrix-vector products that read each weight once. Cost: 2 * m * in * out
/// FLOPs.
void matmul(int64_t m, int64_t out, int64_t in, const float* a, const float* w, float* c,
            Accumulate accumulate = Accumulate::kOverwrite);

/// The gradients of c = a W^T from dc [m, out]: da [m, in] = dc W, and dw [out, in] = dc^T a. 2 * m * in *
/// out FLOPs each. kAdd adds to da or dw (dw over the tiles of a batch).
void matmul_input_gradient(int64_t m, int64_t out, int64_t in, const float* dc, const float* w, float* da,
                           Accumulate accumulate = Accumulate::kOverwrite);
void matmul_weight_gradient(int64_t m, int64_t out, int64_t in, const float* dc, const float* a, float* dw,
                            Accumulate accumulate = Accumulate::kAdd);

/// The definition in fp64.
void matmul_reference(int64_t m, int64_t out, int64_t in, const double* a, const double* w, double* c,
                      Accumulate accumulate = Accumulate::kOverwrite);

/// Threads for every CPU kernel of this process: OpenMP's and OpenBLAS's. At least 1. Throws UserError where
/// there is no room for OpenBLAS's buffers.
void set_kernel_threads(int threads);
int kernel_threads();

/// FLOP/s of a large square fp32 product on this rank's threads, measured for about `seconds`.
double measure_matmul_rate(double seconds);

}  // namespace longhalo

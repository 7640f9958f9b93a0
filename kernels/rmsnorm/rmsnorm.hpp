// RMSNorm: out = x / sqrt(mean(x^2) + epsilon) * weight, over each row.
#pragma once

#include <cstdint>

namespace longhalo {

/// x, out [n, D], weight [D]; out may be x.
void rmsnorm(int64_t n, int64_t hidden, const float* x, const float* weight, float epsilon, float* out);
void rmsnorm_reference(int64_t n, int64_t hidden, const double* x, const double* weight, double epsilon,
                       double* out);

}  // namespace longhalo

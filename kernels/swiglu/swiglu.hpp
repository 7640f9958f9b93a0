// SwiGLU: out = silu(gate) * up, with silu(x) = x / (1 + exp(-x)).
#pragma once

#include <cstdint>

namespace longhalo {

/// gate_up [n, 2F]: each row holds F gates, then F ups. out [n, F]; must not overlap gate_up.
void swiglu(int64_t n, int64_t ffn, const float* gate_up, float* out);
void swiglu_reference(int64_t n, int64_t ffn, const double* gate_up, double* out);

}  // namespace longhalo

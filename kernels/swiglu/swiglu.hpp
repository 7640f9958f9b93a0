// SwiGLU: out = silu(gate) * up, with silu(x) = x / (1 + exp(-x)).
#pragma once

#include <cstdint>

#include "device/stream_handle.hpp"
#include "kernels/common/fp8.hpp"
#include "kernels/common/int8.hpp"

namespace longhalo {

/// gate_up [n, 2F]: each row holds F gates, then F ups. out [n, F]; must not overlap gate_up.
void swiglu(int64_t n, int64_t ffn, const float* gate_up, float* out);
void swiglu_reference(int64_t n, int64_t ffn, const double* gate_up, double* out);

/// The gradient: with s = 1 / (1 + exp(-gate)), d_gate = d_out up s (1 + gate (1 - s)), d_up = d_out gate s.
/// d_out [n, F]; d_gate_up [n, 2F] as gate_up, overwritten; it may be gate_up itself, not d_out.
void swiglu_backward(int64_t n, int64_t ffn, const float* gate_up, const float* d_out, float* d_gate_up);
void swiglu_backward_reference(int64_t n, int64_t ffn, const double* gate_up, const double* d_out,
                               double* d_gate_up);

/// GPU: each element read once, out written once. ffn a multiple of 8; arrays 16-byte aligned.
void swiglu(StreamHandle stream, int64_t n, int64_t ffn, const BFloat16* gate_up, BFloat16* out);
/// GPU, and the result quantised in the same pass, from fp32 (quantize.hpp says how; in fp8 without
/// outliers); beyond F = 32768 gate_up is read twice.
void swiglu(StreamHandle stream, int64_t n, int64_t ffn, const BFloat16* gate_up, const Fp8Rows& out);
void swiglu(StreamHandle stream, int64_t n, int64_t ffn, const BFloat16* gate_up, const Int8Rows& out);

/// GPU: the gradient, and out [n, F] made again in the same pass unless it is nullptr (the gradient of the
/// next weight needs it). d_gate_up may be gate_up; out and d_out must not overlap them. Bytes: 12 * n * F
/// with out, 10 * n * F without.
void swiglu_backward(StreamHandle stream, int64_t n, int64_t ffn, const BFloat16* gate_up,
                     const BFloat16* d_out, BFloat16* d_gate_up, BFloat16* out);

}  // namespace longhalo

#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/rows.cuh"
#include "kernels/swiglu/swiglu.hpp"

namespace longhalo {
namespace {

constexpr int kThreads = 256;

// One thread for eight gates, their ups and what becomes of them.
template <bool kWithOut>
__global__ void __launch_bounds__(kThreads)
    swiglu_gradient_kernel(int64_t all, int64_t vectors, const BFloat16* gate_up, const BFloat16* d_out,
                           BFloat16* d_gate_up, BFloat16* out) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= all) return;
  const int64_t gates = (at + at / vectors * vectors) * kVectorWidth, ups = gates + vectors * kVectorWidth;
  float gate[8], up[8], d[8], d_gate[8], d_up[8], value[8];
  unpack(load_vector(gate_up + gates), gate);
  unpack(load_vector(gate_up + ups), up);
  unpack(load_vector(d_out + at * kVectorWidth), d);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // Where exp(-gate) overflows, s is 0, and so is all that it is multiplied with.
    const float s = __fdividef(1.0F, 1.0F + __expf(-gate[i])), silu = gate[i] * s;
    d_gate[i] = d[i] * up[i] * fmaf(silu, 1.0F - s, s);
    d_up[i] = d[i] * silu;
    value[i] = silu * up[i];
  }
  store_vector(d_gate_up + gates, pack(d_gate));
  store_vector(d_gate_up + ups, pack(d_up));
  if constexpr (kWithOut) store_vector(out + at * kVectorWidth, pack(value));
}

}  // namespace

void swiglu_backward(StreamHandle stream, int64_t n, int64_t ffn, const BFloat16* gate_up,
                     const BFloat16* d_out, BFloat16* d_gate_up, BFloat16* out) {
  check(n >= 0 && ffn > 0 && ffn % kVectorWidth == 0, "the width of a row is a positive multiple of 8");
  if (n == 0) return;
  const NvtxRange range("swiglu's gradient");
  for (const BFloat16* data :
       {gate_up, d_out, static_cast<const BFloat16*>(d_gate_up), static_cast<const BFloat16*>(out)})
    check_aligned(data);
  const int64_t vectors = ffn / kVectorWidth, all = n * vectors, blocks = (all + kThreads - 1) / kThreads;
  check(blocks <= std::numeric_limits<int32_t>::max(), "the rows of one call fit one grid");
  const auto kernel = out != nullptr ? swiglu_gradient_kernel<true> : swiglu_gradient_kernel<false>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(all, vectors, gate_up, d_out, d_gate_up,
                                                                 out);
  check_launch("swiglu's gradient", stream);
}

}  // namespace longhalo

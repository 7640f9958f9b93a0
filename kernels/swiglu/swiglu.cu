#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/quantised_rows.cuh"
#include "kernels/common/rows.cuh"
#include "kernels/swiglu/swiglu.hpp"

namespace longhalo {
namespace {

// silu(gate) * up. Where exp(-gate) overflows, silu is below fp32's smallest number, and becomes 0.
__device__ void gate_vector(const Bf16x8& gates, const Bf16x8& ups, float (&out)[8]) {
  float gate[8];
  unpack(gates, gate);
  unpack(ups, out);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    out[i] *= __fdividef(gate[i], 1.0F + __expf(-gate[i]));
}

template <RowFit kFit>
__global__ void __launch_bounds__(kMaxRowThreads)
    swiglu_rows(int64_t n, int64_t ffn, int vectors, const BFloat16* __restrict__ gate_up,
                BFloat16* __restrict__ out) {
  const int64_t row = row_of_thread();
  if (row >= n) return;
  const Row<kFit> gates(gate_up + row * 2 * ffn, vectors), ups(gate_up + (row * 2 + 1) * ffn, vectors);
  for_each_vector<kFit>(vectors, [&](int slot, int at) {
    float v[8];
    gate_vector(gates.get(slot, at), ups.get(slot, at), v);
    store_vector(out + row * ffn + at * kVectorWidth, pack(v));
  });
}

template <RowFit kFit, class Rows>
__global__ void __launch_bounds__(kMaxRowThreads)
    swiglu_quantised_rows(int64_t n, int64_t ffn, int vectors, const BFloat16* __restrict__ gate_up,
                          Rows out) {
  const int64_t row = row_of_thread();
  if (row >= n) return;
  const Row<kFit> gates(gate_up + row * 2 * ffn, vectors), ups(gate_up + (row * 2 + 1) * ffn, vectors);
  float kept[kHeldVectors<kFit>][8];
  const auto fill = [&](int slot, int at, bool inside) {
    if (inside) {
      gate_vector(gates.get(slot, at), ups.get(slot, at), kept[slot]);
      centre(out, at * kVectorWidth, kept[slot]);
    } else {
#pragma unroll
      for (float& value : kept[slot])
        value = 0;
    }
    rotate(out, kept[slot]);
  };
  SumMax mine;
  for_each_vector_of_warps<kFit>(vectors, [&](int slot, int at, bool inside) {
    fill(slot, at, inside);
#pragma unroll
    for (float value : kept[slot])
      mine.max = larger(out, mine.max, value);
  });
  const RowScale scale = row_scale(out, reduce_row(found(mine)).max);
  for_each_vector_of_warps<kFit>(vectors, [&](int slot, int at, bool inside) {
    if constexpr (kFit == RowFit::kReadAgain) fill(slot, at, inside);
    if (inside) store(out, row * ffn + at * kVectorWidth, kept[slot], scale.inverse);
  });
  if (threadIdx.x == 0) out.scales[row] = scale.scale;
}

}  // namespace

void swiglu(StreamHandle stream, int64_t n, int64_t ffn, const BFloat16* gate_up, BFloat16* out) {
  if (n == 0) return;
  const NvtxRange range("swiglu");
  const RowLaunch at = row_launch(n, ffn);
  check_aligned(gate_up);
  check_aligned(out);
  const auto kernel =
      chosen(at, swiglu_rows<RowFit::kReadAgain>, swiglu_rows<RowFit::kKept>, swiglu_rows<RowFit::kFilled>);
  kernel<<<at.grid, at.block, 0, stream>>>(n, ffn, at.vectors, gate_up, out);
  check_launch("swiglu", stream);
}

namespace {

template <class Rows>
void swiglu_quantised(const char* name, StreamHandle stream, int64_t n, int64_t ffn, const BFloat16* gate_up,
                      const Rows& out) {
  if (n == 0) return;
  const NvtxRange range(name);
  const RowLaunch at = row_launch(n, ffn);
  check_aligned(gate_up);
  check_rows(ffn, out, at);
  const auto kernel =
      chosen(at, swiglu_quantised_rows<RowFit::kReadAgain, Rows>, swiglu_quantised_rows<RowFit::kKept, Rows>,
             swiglu_quantised_rows<RowFit::kFilled, Rows>);
  kernel<<<at.grid, at.block, 0, stream>>>(n, ffn, at.vectors, gate_up, out);
  check_launch(name, stream);
}

}  // namespace

void swiglu(StreamHandle stream, int64_t n, int64_t ffn, const BFloat16* gate_up, const Fp8Rows& out) {
  check(out.outliers.count == 0, "SwiGLU stores no outliers");
  swiglu_quantised("swiglu to fp8", stream, n, ffn, gate_up, out);
}

void swiglu(StreamHandle stream, int64_t n, int64_t ffn, const BFloat16* gate_up, const Int8Rows& out) {
  swiglu_quantised("swiglu to int8", stream, n, ffn, gate_up, out);
}

}  // namespace longhalo

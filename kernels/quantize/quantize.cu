#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/rows.cuh"
#include "kernels/quantize/quantize.hpp"

namespace longhalo {
namespace {

template <bool kKept>
__global__ void __launch_bounds__(kMaxRowThreads)
    quantize_rows_kernel(int64_t n, int64_t width, int vectors, const BFloat16* __restrict__ x, Fp8Rows out) {
  const int64_t row = row_of_thread();
  if (row >= n) return;
  const Row<kKept> in(x + row * width, vectors);
  SumMax mine;
  for_each_vector<kKept>(vectors, [&](int slot, int at) {
    float v[8];
    unpack(in.get(slot, at), v);
#pragma unroll
    for (float value : v)
      mine.max = fmaxf(mine.max, fabsf(value));
  });
  const Fp8Scale scale = fp8_scale(reduce_row(mine).max);
  for_each_vector<kKept>(vectors, [&](int slot, int at) {
    float v[8];
    unpack(in.get(slot, at), v);
#pragma unroll
    for (float& value : v)
      value *= scale.inverse;
    store_e4m3(out.values + row * width + at * kVectorWidth, v);
  });
  if (threadIdx.x == 0) out.scales[row] = scale.scale;
}

}  // namespace

void quantize_rows(StreamHandle stream, int64_t n, int64_t width, const BFloat16* x, const Fp8Rows& out) {
  if (n == 0) return;
  const NvtxRange range("quantize rows");
  const RowLaunch at = row_launch(n, width);
  check_aligned(x);
  check_aligned(out.values, 8);
  const auto kernel = at.kept ? quantize_rows_kernel<true> : quantize_rows_kernel<false>;
  kernel<<<at.grid, at.block, 0, stream>>>(n, width, at.vectors, x, out);
  check_launch("quantize rows", stream);
}

}  // namespace longhalo

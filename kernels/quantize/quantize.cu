#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/quantised_rows.cuh"
#include "kernels/common/rows.cuh"
#include "kernels/quantize/quantize.hpp"

namespace longhalo {
namespace {

template <RowFit kFit, class Rows>
__global__ void __launch_bounds__(kMaxRowThreads)
    quantize_rows_kernel(int64_t n, int64_t width, int vectors, const BFloat16* __restrict__ x, Rows out) {
  const int64_t row = row_of_thread();
  if (row >= n) return;
  const Row<kFit> in(x + row * width, vectors);
  const Outlier outlier = outlier_of_thread(out);
  float kept[kHeldVectors<kFit>][8];
  const auto fill = [&](int slot, int at, bool inside) {
    unpack(inside ? in.get(slot, at) : Bf16x8{}, kept[slot]);
    if (inside) centre(out, at * kVectorWidth, kept[slot]);
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
  const int64_t first = row * stored_width(out, width);
  const float strong = outlier.is_one() ? to_float_device(x[row * width + outlier.column]) - outlier.mean : 0;
  for_each_vector_of_warps<kFit>(vectors, [&](int slot, int at, bool inside) {
    if constexpr (kFit == RowFit::kReadAgain) fill(slot, at, inside);
    if (inside) store(out, first + at * kVectorWidth, kept[slot], scale.inverse);
  });
  store_outlier(out, first + width, outlier, strong, scale.inverse);
  if (threadIdx.x == 0) out.scales[row] = scale.scale;
}

constexpr int kScales = 16;  // that are tried, an octave of them

__device__ RowScale scale_of_step(const RowScale& first, int step) {
  const float octaves = static_cast<float>(step) / kScales;
  return {first.scale * exp2f(octaves), first.inverse * exp2f(-octaves)};
}

// x rounded to e4m3, minus x.
__device__ float2 e4m3_errors(float2 x) {
  const __nv_fp8x2_storage_t codes = __nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, __NV_E4M3);
  const float2 rounded = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3)));
  return make_float2(rounded.x - x.x, rounded.y - x.y);
}

// Sums over this thread's row, the same bits in each of its threads. NOTE: as reduce_row(), at most once in a
// kernel, and by every thread of the row.
__device__ void sum_over_row(float (&mine)[kScales]) {
#pragma unroll
  for (float& sum : mine) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
      sum += __shfl_xor_sync(0xffffffffU, sum, lanes);
  }
  if (blockDim.x == 32) return;
  __shared__ float warps[kMaxRowThreads / 32][kScales];
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int step = 0; step < kScales; ++step)
      warps[threadIdx.x / 32][step] = mine[step];
  }
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kScales; ++step) {
    mine[step] = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp)
      mine[step] += warps[warp][step];
  }
}

// Errors are in units of the first scale, so that no square leaves fp32. Where they are NaN the first scale
// stays.
template <RowFit kFit>
__global__ void __launch_bounds__(kMaxRowThreads)
    quantize_rows_least_error_kernel(int64_t n, int64_t width, int vectors, const BFloat16* __restrict__ x,
                                     Fp8Rows out) {
  const int64_t row = row_of_thread();
  if (row >= n) return;
  const Row<kFit> in(x + row * width, vectors);
  SumMax mine;
  for_each_vector<kFit>(vectors, [&](int slot, int at) {
    float v[8];
    unpack(in.get(slot, at), v);
#pragma unroll
    for (float value : v)
      mine.max = larger(out, mine.max, value);
  });
  const RowScale first = row_scale(out, reduce_row(mine).max);
  float errors[kScales] = {};
  for_each_vector<kFit>(vectors, [&](int slot, int at) {
    float v[8];
    unpack(in.get(slot, at), v);
#pragma unroll
    for (int step = 0; step < kScales; ++step) {
      const RowScale relative = scale_of_step({1, 1}, step);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float down = first.inverse * relative.inverse;
        const float2 e = e4m3_errors(make_float2(v[i] * down, v[i + 1] * down));
        sum += e.x * e.x + e.y * e.y;
      }
      errors[step] += sum * (relative.scale * relative.scale);
    }
  });
  sum_over_row(errors);
  int best = 0;
  float least = errors[0];
#pragma unroll
  for (int step = 1; step < kScales; ++step) {
    if (errors[step] < least) {
      best = step;
      least = errors[step];
    }
  }
  const RowScale scale = scale_of_step(first, best);
  for_each_vector<kFit>(vectors, [&](int slot, int at) {
    float v[8];
    unpack(in.get(slot, at), v);
    store(out, row * width + at * kVectorWidth, v, scale.inverse);
  });
  if (threadIdx.x == 0) out.scales[row] = scale.scale;
}

// `kernels`: as chosen() takes them.
template <class Rows, class... Kernels>
void launch(const char* name, StreamHandle stream, int64_t n, int64_t width, const BFloat16* x,
            const Rows& out, Kernels... kernels) {
  if (n == 0) return;
  const NvtxRange range(name);
  const RowLaunch at = row_launch(n, width);
  check_aligned(x);
  check_rows(width, out, at);
  const auto kernel = chosen(at, kernels...);
  kernel<<<at.grid, at.block, 0, stream>>>(n, width, at.vectors, x, out);
  check_launch(name, stream);
}

template <class Rows>
void quantize(const char* name, StreamHandle stream, int64_t n, int64_t width, const BFloat16* x,
              const Rows& out) {
  launch(name, stream, n, width, x, out, quantize_rows_kernel<RowFit::kReadAgain, Rows>,
         quantize_rows_kernel<RowFit::kKept, Rows>, quantize_rows_kernel<RowFit::kFilled, Rows>);
}

}  // namespace

void quantize_rows(StreamHandle stream, int64_t n, int64_t width, const BFloat16* x, const Fp8Rows& out) {
  quantize("quantize rows to fp8", stream, n, width, x, out);
}

void quantize_rows(StreamHandle stream, int64_t n, int64_t width, const BFloat16* x, const Int8Rows& out) {
  quantize("quantize rows to int8", stream, n, width, x, out);
}

void quantize_rows_least_error(StreamHandle stream, int64_t n, int64_t width, const BFloat16* x,
                               const Fp8Rows& out) {
  check(out.mean == nullptr && out.outliers.count == 0, "weights are rounded as they are");
  launch("quantize rows with least error", stream, n, width, x, out,
         quantize_rows_least_error_kernel<RowFit::kReadAgain>,
         quantize_rows_least_error_kernel<RowFit::kKept>, quantize_rows_least_error_kernel<RowFit::kFilled>);
}

}  // namespace longhalo

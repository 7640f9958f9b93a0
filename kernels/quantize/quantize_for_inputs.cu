#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "device/cuda_check.hpp"
#include "device/device_buffer.hpp"
#include "device/nvtx.hpp"
#include "kernels/chunk_sums/chunk_sums.hpp"
#include "kernels/common/bf16_vector.cuh"
#include "kernels/quantize/quantize.hpp"
#include "kernels/quantize/quantize_for_inputs.hpp"

namespace longhalo {
namespace {

constexpr int kPasses = 3;    // a fourth gains little
constexpr int kColumns = 64;  // that go one after another while the rest of a row waits; two a thread
constexpr int kRowsOfBlock = 8;
constexpr int kThreads = 256;
constexpr const char* kPurpose = "rounding weights";

__global__ void mean_of_sums(int64_t width, double count, const double* sums, BFloat16* mean) {
  const int64_t c = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (c < width) mean[c] = to_bfloat16_device(static_cast<float>(sums[c] / count));
}

__global__ void take_off(int64_t width, const BFloat16* x, const BFloat16* mean, BFloat16* centred) {
  const int64_t column = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x, row = blockIdx.x;
  if (column >= width) return;
  const int64_t at = row * width + column;
  centred[at] = to_bfloat16_device(to_float_device(x[at]) - to_float_device(mean[column]));
}

// The mean of the diagonal of products [width, width], by one block.
__global__ void mean_of_diagonal(int64_t width, const float* products, double* mean) {
  __shared__ double sums[kThreads];
  double sum = 0;
  for (int64_t c = threadIdx.x; c < width; c += kThreads)
    sum += products[c * width + c];
  sums[threadIdx.x] = sum;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *mean = sums[0] / static_cast<double>(width);
}

__global__ void shrink(int64_t width, double count, const float* products, const double* diagonal,
                       BFloat16* covariance) {
  const int64_t column = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x, row = blockIdx.x;
  if (column >= width) return;
  const double sum = products[row * width + column] + (row == column ? *diagonal : 0);
  covariance[row * width + column] = to_bfloat16_device(static_cast<float>(sum / count));
}

// What rounding did: values * scale - w.
__global__ void rounding_errors(int64_t width, const BFloat16* w, Fp8Rows rounded, BFloat16* errors) {
  const int64_t column = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x, row = blockIdx.x;
  if (column >= width) return;
  const int64_t at = row * width + column;
  const float error = to_float_device(rounded.values[at]) * rounded.scales[row] - to_float_device(w[at]);
  errors[at] = to_bfloat16_device(error);
}

// `count` columns from `first` on, one after another; a warp has a row, a thread two of its columns.
// `gradient` [width, n]: half of E's, C d^T; moves [count, n]: by how much each number moved. What moves do
// to the columns behind is the caller's to add.
__global__ void __launch_bounds__(32 * kRowsOfBlock)
    descend(int64_t n, int64_t width, int64_t first, int count, const BFloat16* covariance,
            const float* gradient, Fp8Rows rows, BFloat16* moves) {
  __shared__ float block[kColumns][kColumns];
  const int lane = static_cast<int>(threadIdx.x);
  for (int at = static_cast<int>(threadIdx.y) * 32 + lane; at < count * kColumns; at += 32 * kRowsOfBlock) {
    const int i = at / kColumns, j = at % kColumns;
    block[i][j] = j < count ? to_float_device(covariance[(first + i) * width + first + j]) : 0;
  }
  __syncthreads();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsOfBlock + threadIdx.y;
  if (row >= n) return;
  const float scale = rows.scales[row], inverse = scale > 0 ? 1 / scale : 0;
  Fp8E4M3* const codes = rows.values + row * width + first;
  float value[2] = {}, slope[2] = {}, moved[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = 32 * half + lane;
    if (column >= count) continue;
    value[half] = to_float_device(codes[column]);
    slope[half] = gradient[(first + column) * n + row];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int end = min(32, count - 32 * half);
    for (int owner = 0; owner < end; ++owner) {
      const int column = 32 * half + owner;
      const float from = __shfl_sync(0xffffffffU, value[half], owner);
      const float curvature = block[column][column];
      const float wanted = from - __shfl_sync(0xffffffffU, slope[half], owner) * inverse / curvature;
      if (!(curvature > 0 && isfinite(wanted))) continue;  // alike in all threads of the warp
      const float to = to_float_device(to_e4m3_device(wanted)), move = (to - from) * scale;
      if (lane == owner) {
        value[half] = to;
        moved[half] = move;
      }
      slope[0] = fmaf(move, block[column][lane], slope[0]);
      slope[1] = fmaf(move, block[column][32 + lane], slope[1]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = 32 * half + lane;
    if (column >= count) continue;
    codes[column] = to_e4m3_device(value[half]);
    moves[column * n + row] = to_bfloat16_device(moved[half]);
  }
}

// Columns of rows [n, width], and behind them once more those that are out's outliers.
__global__ void append_outliers(int64_t width, const Fp8E4M3* rows, Fp8Rows out) {
  const int64_t at = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x, row = blockIdx.x;
  if (at >= width + out.outliers.count) return;
  const int64_t column = at < width ? at : out.outliers.columns[at - width];
  out.values[row * (width + out.outliers.count) + at] = rows[row * width + column];
}

// Of w [n, width] and the covariance: for each column its square and its variance.
__global__ void columns_sizes(int64_t n, int64_t width, const BFloat16* w, const BFloat16* covariance,
                              float2* sizes) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= width) return;
  float square = 0;
#pragma unroll 8
  for (int64_t row = 0; row < n; ++row) {
    const float x = to_float_device(w[row * width + column]);
    square = fmaf(x, x, square);
  }
  sizes[column] = make_float2(square, to_float_device(covariance[column * width + column]));
}

dim3 grid_of(int64_t rows, int64_t columns) {
  return {static_cast<unsigned>(rows), static_cast<unsigned>((columns + kThreads - 1) / kThreads)};
}

}  // namespace

void mean_and_covariance(DeviceMatmul& matmul, StreamHandle stream, int64_t n, int64_t width,
                         const BFloat16* x, BFloat16* mean, BFloat16* covariance) {
  check(n > 0, "a mean is one of some rows");
  const NvtxRange range("mean and covariance");
  DeviceBuffer<double> sums(width, kPurpose, stream);
  DeviceBuffer<float> products(width * width, kPurpose, stream);
  check_cuda(cudaMemsetAsync(sums.data(), 0, static_cast<size_t>(sums.bytes()), stream), "cudaMemsetAsync");
  add_chunk_sums(stream, n, width, x, 0, n, sums.data());
  const auto count = static_cast<double>(n);
  mean_of_sums<<<grid_of(1, width), kThreads, 0, stream>>>(width, count, sums.data(), mean);
  check_launch("mean of sums", stream);
  // Before the products: what a column has in common may be far larger than how it varies, and sums of
  // products in fp32 may lose the latter.
  DeviceBuffer<BFloat16> centred(n * width, kPurpose, stream);
  take_off<<<grid_of(n, width), kThreads, 0, stream>>>(width, x, mean, centred.data());
  check_launch("take off a mean", stream);
  matmul.weight_gradient(n, width, width, centred.data(), centred.data(), products.data(),
                         Accumulate::kOverwrite);
  DeviceBuffer<double> diagonal(1, kPurpose, stream);
  mean_of_diagonal<<<1, kThreads, 0, stream>>>(width, products.data(), diagonal.data());
  check_launch("mean of a diagonal", stream);
  shrink<<<grid_of(width, width), kThreads, 0, stream>>>(width, count, products.data(), diagonal.data(),
                                                         covariance);
  check_launch("covariance", stream);
}

void quantize_rows_for_inputs(DeviceMatmul& matmul, StreamHandle stream, int64_t n, int64_t width,
                              const BFloat16* w, const BFloat16* covariance, const Fp8Rows& out) {
  check(n % 16 == 0 && width % 16 == 0, "the sizes of weights in fp8 are multiples of 16");
  DeviceBuffer<Fp8E4M3> once(out.outliers.count > 0 ? n * width : 0, kPurpose, stream);
  const Fp8Rows rows{out.outliers.count > 0 ? once.data() : out.values, out.scales};
  quantize_rows_least_error(stream, n, width, w, rows);
  const NvtxRange range("quantize rows for inputs");
  DeviceBuffer<BFloat16> errors(n * width, kPurpose, stream), moves(kColumns * n, kPurpose, stream);
  DeviceBuffer<float> gradient(n * width, kPurpose, stream);
  const auto blocks = static_cast<unsigned>((n + kRowsOfBlock - 1) / kRowsOfBlock);
  for (int pass = 0; pass < kPasses; ++pass) {
    rounding_errors<<<grid_of(n, width), kThreads, 0, stream>>>(width, w, rows, errors.data());
    check_launch("rounding errors", stream);
    matmul.run(width, n, width, covariance, errors.data(), gradient.data());
    for (int64_t first = 0; first < width; first += kColumns) {
      const auto count = static_cast<int>(std::min<int64_t>(kColumns, width - first));
      descend<<<blocks, dim3(32, kRowsOfBlock), 0, stream>>>(n, width, first, count, covariance,
                                                             gradient.data(), rows, moves.data());
      check_launch("coordinate descent", stream);
      const int64_t next = first + count;
      if (next < width)
        matmul.weight_gradient(count, width - next, n, covariance + first * width + next, moves.data(),
                               gradient.data() + next * n, Accumulate::kAdd, width);
    }
  }
  if (out.outliers.count == 0) return;
  append_outliers<<<grid_of(n, width + out.outliers.count), kThreads, 0, stream>>>(width, once.data(), out);
  check_launch("append outliers", stream);
}

std::vector<int32_t> find_outliers(StreamHandle stream, int64_t n, int64_t width, const BFloat16* w,
                                   const BFloat16* covariance, int64_t count) {
  check(count >= 0 && count <= width, "outliers are some of the columns");
  if (count == 0) return {};
  DeviceBuffer<float2> on_device(width, kPurpose, stream);
  const auto blocks = static_cast<unsigned>((width + kThreads - 1) / kThreads);
  columns_sizes<<<blocks, kThreads, 0, stream>>>(n, width, w, covariance, on_device.data());
  check_launch("sizes of columns", stream);
  std::vector<float2> sizes(static_cast<size_t>(width));
  to_host<float2>(sizes, on_device.data(), stream);
  double diagonal = 0;
  for (const float2& size : sizes)
    diagonal += double{size.y} / static_cast<double>(width);
  const auto cost_of = [&](int32_t column) {
    const float2& size = sizes[static_cast<size_t>(column)];
    const double cost = size.x * (size.y - diagonal / 2);  // half of the mean was added to the variance
    return std::isnan(cost) ? -std::numeric_limits<double>::infinity() : cost;
  };
  std::vector<int32_t> columns(static_cast<size_t>(width));
  std::iota(columns.begin(), columns.end(), 0);
  std::stable_sort(columns.begin(), columns.end(),
                   [&](int32_t a, int32_t b) { return cost_of(a) > cost_of(b); });
  columns.resize(static_cast<size_t>(count));
  std::sort(columns.begin(), columns.end());
  return columns;
}

}  // namespace longhalo

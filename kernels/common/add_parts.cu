#include "kernels/common/add_parts.hpp"

#include "core/error.hpp"
#include "device/cuda_check.hpp"

namespace longhalo {
namespace {

constexpr int kColumns = 32;  // of a block
constexpr int kLanes = 16;    // threads of a column

__global__ void __launch_bounds__(kColumns* kLanes)
    add_parts_kernel(const float* parts, int64_t count, int64_t width, float* to) {
  __shared__ double sums[kLanes][kColumns];
  const int at = static_cast<int>(threadIdx.x) % kColumns, lane = static_cast<int>(threadIdx.x) / kColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + at;
  double sum = 0;
  if (column < width) {
#pragma unroll 4
    for (int64_t part = lane; part < count; part += kLanes)
      sum += static_cast<double>(parts[part * width + column]);
  }
  sums[lane][at] = sum;
  __syncthreads();
  if (lane != 0 || column >= width) return;
  for (int other = 1; other < kLanes; ++other)
    sum += sums[other][at];
  to[column] += static_cast<float>(sum);
}

}  // namespace

void add_parts(StreamHandle stream, const float* parts, int64_t count, int64_t width, float* to) {
  if (count == 0 || width == 0) return;
  const int64_t blocks = (width + kColumns - 1) / kColumns;
  check(count > 0 && width > 0 && blocks <= INT32_MAX, "the columns of a sum over parts fit one grid");
  add_parts_kernel<<<static_cast<unsigned>(blocks), kColumns * kLanes, 0, stream>>>(parts, count, width, to);
  check_launch("sums of parts", stream);
}

}  // namespace longhalo

#include "kernels/elementwise/elementwise.hpp"

#include "device/cuda_check.hpp"
#include "kernels/common/rows.cuh"

namespace longhalo {
namespace {

constexpr int kThreads = 256;

__device__ void load_eight(const float* x, float (&to)[8]) {
  load_vector(x, to);
}
__device__ void load_eight(const BFloat16* x, float (&to)[8]) {
  unpack(load_vector(x), to);
}
__device__ void store_eight(float* x, const float (&from)[8]) {
  auto* const to = reinterpret_cast<float4*>(x);
  to[0] = make_float4(from[0], from[1], from[2], from[3]);
  to[1] = make_float4(from[4], from[5], from[6], from[7]);
}
__device__ void store_eight(BFloat16* x, const float (&from)[8]) {
  store_vector(x, pack(from));
}
__device__ float load_one(float x) {
  return x;
}
__device__ float load_one(BFloat16 x) {
  return to_float_device(x);
}
__device__ void store_one(float* x, float value) {
  *x = value;
}
__device__ void store_one(BFloat16* x, float value) {
  *x = to_bfloat16_device(value);
}

struct Assign {
  __device__ float operator()(float from, float) const { return from; }
  static constexpr bool kReads = false;  // the result's old value
};
struct Add {
  __device__ float operator()(float from, float to) const { return to + from; }
  static constexpr bool kReads = true;
};
struct Scale {
  float factor;
  __device__ float operator()(float from, float) const { return from * factor; }
  static constexpr bool kReads = false;
};

template <class From, class To, class Operation>
__global__ void __launch_bounds__(kThreads)
    elementwise_kernel(int64_t n, const From* from, To* to, Operation operation) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (at + 8 <= n) {
    float a[8], b[8] = {};
    load_eight(from + at, a);
    if constexpr (Operation::kReads) load_eight(to + at, b);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      b[i] = operation(a[i], b[i]);
    store_eight(to + at, b);
    return;
  }
  for (int64_t i = at; i < n; ++i)
    store_one(to + i, operation(load_one(from[i]), Operation::kReads ? load_one(to[i]) : 0.0F));
}

template <class From, class To, class Operation>
void run(StreamHandle stream, int64_t n, const From* from, To* to, Operation operation) {
  if (n == 0) return;
  const int64_t blocks = (n + int64_t{8} * kThreads - 1) / (int64_t{8} * kThreads);
  check(n > 0 && blocks <= INT32_MAX, "the elements of one call fit one grid");
  if (n >= 8) {
    check_aligned(from);
    check_aligned(to);
  }
  elementwise_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(n, from, to, operation);
  check_launch("elementwise", stream);
}

__global__ void __launch_bounds__(kThreads)
    add_to_rows_kernel(int64_t n, int64_t width, const BFloat16* row, BFloat16* to) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (at >= n * width) return;
  float a[8], b[8];
  load_eight(row + at % width, a);
  load_eight(to + at, b);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    b[i] += a[i];
  store_eight(to + at, b);
}

constexpr int kNormBlocks = 1024;
static_assert(kNormBlocks * sizeof(double) == kSquaredNormBytes);

// The sum of all threads' numbers, by pairs.
__device__ double sum_of_block(double mine) {
  __shared__ double sums[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  sums[thread] = mine;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  return sums[0];  // of thread 0
}

// Eight squares are added in fp32, and these in double.
__global__ void __launch_bounds__(kThreads) squares_kernel(int64_t n, const float* x, double* partial) {
  double sum = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * 8;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8; at < n; at += step) {
    float some = 0;
    if (at + 8 <= n) {
      float v[8];
      load_vector(x + at, v);
#pragma unroll
      for (float value : v)
        some = fmaf(value, value, some);
    } else {
      for (int64_t i = at; i < n; ++i)
        some = fmaf(x[i], x[i], some);
    }
    sum += static_cast<double>(some);
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) sum_kernel(int count, const double* partial, double* to) {
  double sum = 0;
  for (int at = static_cast<int>(threadIdx.x); at < count; at += kThreads)
    sum += partial[at];
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) *to = sum;
}

}  // namespace

void add_to_rows(StreamHandle stream, int64_t n, int64_t width, const BFloat16* row, BFloat16* to) {
  if (n == 0) return;
  const int64_t blocks = (n * width + int64_t{8} * kThreads - 1) / (int64_t{8} * kThreads);
  check(n > 0 && width > 0 && width % 8 == 0 && blocks <= INT32_MAX, "the rows of one call fit one grid");
  check_aligned(row);
  check_aligned(to);
  add_to_rows_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(n, width, row, to);
  check_launch("add to rows", stream);
}

void convert(StreamHandle stream, int64_t n, const float* from, BFloat16* to) {
  run(stream, n, from, to, Assign{});
}

void convert(StreamHandle stream, int64_t n, const BFloat16* from, float* to) {
  run(stream, n, from, to, Assign{});
}

void add(StreamHandle stream, int64_t n, const float* from, float* to) {
  run(stream, n, from, to, Add{});
}

void add(StreamHandle stream, int64_t n, const BFloat16* from, float* to) {
  run(stream, n, from, to, Add{});
}

void add(StreamHandle stream, int64_t n, const BFloat16* from, BFloat16* to) {
  run(stream, n, from, to, Add{});
}

void scale(StreamHandle stream, int64_t n, float factor, float* x) {
  run(stream, n, static_cast<const float*>(x), x, Scale{factor});
}

void squared_norm(StreamHandle stream, int64_t n, const float* x, double* sum, void* workspace) {
  check(n >= 0, "an array has no negative length");
  if (n >= 8) check_aligned(x);
  const int64_t blocks = (n + int64_t{8} * kThreads - 1) / (int64_t{8} * kThreads);
  const int used = static_cast<int>(std::min<int64_t>(blocks, kNormBlocks));
  auto* const partial = static_cast<double*>(workspace);
  if (used > 0) {
    squares_kernel<<<static_cast<unsigned>(used), kThreads, 0, stream>>>(n, x, partial);
    check_launch("squared norm", stream);
  }
  sum_kernel<<<1, kThreads, 0, stream>>>(used, partial, sum);
  check_launch("squared norm", stream);
}

}  // namespace longhalo

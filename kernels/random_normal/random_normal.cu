#include <cuda_bf16.h>

#include <algorithm>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/random_normal/random_normal.hpp"

namespace longhalo {
namespace {

constexpr int kThreads = 256;
constexpr int kValues = 8;  // a thread and turn: 16 bytes of bf16
constexpr int64_t kMostBlocks = 1 << 16;

__device__ uint64_t hashed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Two independent normal numbers from one counter.
__device__ float2 normal_pair(uint64_t seed, int64_t pair) {
  const uint64_t bits = hashed(hashed(seed) + static_cast<uint64_t>(pair + 1) * 0x9e3779b97f4a7c15ULL);
  // In (0, 1): the logarithm is finite.
  const float u = (static_cast<float>(static_cast<uint32_t>(bits) >> 8) + 0.5F) * 0x1p-24F;
  const float turn = static_cast<float>(static_cast<uint32_t>(bits >> 32) >> 8) * 0x1p-23F;  // half turns
  const float radius = sqrtf(-2.0F * logf(u));
  float2 result;
  sincospif(turn, &result.y, &result.x);
  result.x *= radius;
  result.y *= radius;
  return result;
}

__device__ void store(float* out, float value) {
  *out = value;
}
__device__ void store(__nv_bfloat16* out, float value) {
  *out = __float2bfloat16(value);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    random_normal_kernel(int64_t count, float deviation, uint64_t seed, T* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kValues;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kValues; at < count;
       at += step) {
    alignas(16) T values[kValues];
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      const float2 pair = normal_pair(seed, (at + i) / 2);
      store(&values[i], deviation * pair.x);
      store(&values[i + 1], deviation * pair.y);
    }
    if (at + kValues <= count) {
#pragma unroll
      for (int i = 0; i < kValues; i += 16 / static_cast<int>(sizeof(T)))
        *reinterpret_cast<uint4*>(out + at + i) = *reinterpret_cast<const uint4*>(values + i);
    } else {
      for (int i = 0; i < kValues && at + i < count; ++i)
        out[at + i] = values[i];
    }
  }
}

template <class T>
void launch(StreamHandle stream, int64_t count, float deviation, uint64_t seed, T* out) {
  check(count >= 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0,
        "random numbers go to 16-byte aligned memory");
  if (count == 0) return;
  const NvtxRange range("random_normal");
  const int64_t blocks = (count + kThreads * kValues - 1) / (kThreads * kValues);
  random_normal_kernel<<<static_cast<unsigned>(std::min(blocks, kMostBlocks)), kThreads, 0, stream>>>(
      count, deviation, seed, out);
  check_launch("random_normal", stream);
}

}  // namespace

void random_normal(StreamHandle stream, int64_t count, float deviation, uint64_t seed, BFloat16* out) {
  static_assert(sizeof(BFloat16) == sizeof(__nv_bfloat16));
  launch(stream, count, deviation, seed, reinterpret_cast<__nv_bfloat16*>(out));
}

void random_normal(StreamHandle stream, int64_t count, float deviation, uint64_t seed, float* out) {
  launch(stream, count, deviation, seed, out);
}

}  // namespace longhalo

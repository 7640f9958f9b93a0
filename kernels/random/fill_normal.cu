#include <algorithm>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/rows.cuh"
#include "kernels/random/fill_normal.hpp"

namespace longhalo {
namespace {

constexpr int kThreads = 256;
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15U;  // 2^64 / golden ratio: the step of splitmix64's counter

__host__ __device__ uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

__device__ float2 normal_pair(uint64_t bits) {
  // (0, 1]: the half keeps the logarithm finite.
  const float radius_uniform = (static_cast<float>(static_cast<uint32_t>(bits >> 32)) + 0.5F) * 0x1p-32F;
  const float turn = static_cast<float>(static_cast<uint32_t>(bits)) * 0x1p-32F;
  const float radius = sqrtf(-2 * logf(radius_uniform));
  float sine, cosine;
  sincospif(2 * turn, &sine, &cosine);
  return make_float2(radius * cosine, radius * sine);
}

__global__ void __launch_bounds__(kThreads)
    fill_normal_vectors(int64_t count, uint64_t key, float scale, BFloat16* out) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVectorWidth;
  if (first >= count) return;
  float v[kVectorWidth];
#pragma unroll
  for (int pair = 0; pair < kVectorWidth / 2; ++pair) {
    const uint64_t index = static_cast<uint64_t>(first) / 2 + static_cast<uint64_t>(pair);
    const float2 drawn = normal_pair(mix(key + (index + 1) * kGolden));
    v[2 * pair] = drawn.x * scale;
    v[2 * pair + 1] = drawn.y * scale;
  }
  if (first + kVectorWidth <= count) {
    store_vector(out + first, pack(v));
    return;
  }
#pragma unroll
  for (int i = 0; i < kVectorWidth; ++i)
    if (first + i < count) out[first + i] = to_bfloat16_device(v[i]);
}

}  // namespace

void fill_normal(StreamHandle stream, int64_t count, uint64_t seed, uint64_t stream_id, float scale,
                 BFloat16* out) {
  check(count >= 0, "a count is not negative");
  if (count == 0) return;
  check_aligned(out);
  const NvtxRange range("fill with normal numbers");
  constexpr int64_t kBlock = int64_t{kThreads} * kVectorWidth;
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  check(blocks <= std::numeric_limits<int32_t>::max(), "the numbers of one call fit one grid");
  const uint64_t key = mix(seed + mix(stream_id + kGolden));
  fill_normal_vectors<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(count, key, scale, out);
  check_launch("fill with normal numbers", stream);
}

}  // namespace longhalo

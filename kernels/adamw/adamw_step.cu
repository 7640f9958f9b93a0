#include "kernels/adamw/adamw_step.hpp"

#include <cmath>

#include "core/error.hpp"
#include "device/cuda_check.hpp"
#include "device/nvtx.hpp"
#include "kernels/common/bf16_vector.cuh"

namespace longhalo {
namespace {

constexpr int kThreads = 256;

struct Constants {
  float beta1, beta2, new1, new2, scale, rate, epsilon, keep;
};

__device__ float update(const Constants& c, float gradient, float weight, float& m, float& v) {
  const float g = gradient * c.scale;
  m = c.beta1 * m + c.new1 * g;
  v = c.beta2 * v + c.new2 * g * g;
  return c.keep * weight - c.rate * m / (sqrtf(v) + c.epsilon);
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(Constants c, int64_t n, const float* gradients, float* weights, float* m, float* v,
                 BFloat16* rounded) {
  constexpr int kWide = kAligned ? 4 : 1;  // parameters of a thread
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWide;
  if (at >= n) return;
  if (kAligned && at + kWide <= n) {
    const float4 g4 = *reinterpret_cast<const float4*>(gradients + at);
    float4 w4 = *reinterpret_cast<const float4*>(weights + at);
    float4 m4 = *reinterpret_cast<const float4*>(m + at), v4 = *reinterpret_cast<const float4*>(v + at);
    w4.x = update(c, g4.x, w4.x, m4.x, v4.x);
    w4.y = update(c, g4.y, w4.y, m4.y, v4.y);
    w4.z = update(c, g4.z, w4.z, m4.z, v4.z);
    w4.w = update(c, g4.w, w4.w, m4.w, v4.w);
    *reinterpret_cast<float4*>(weights + at) = w4;
    *reinterpret_cast<float4*>(m + at) = m4;
    *reinterpret_cast<float4*>(v + at) = v4;
    if (rounded != nullptr) {
      ushort4 bits;
      bits.x = to_bfloat16_device(w4.x).bits, bits.y = to_bfloat16_device(w4.y).bits;
      bits.z = to_bfloat16_device(w4.z).bits, bits.w = to_bfloat16_device(w4.w).bits;
      *reinterpret_cast<ushort4*>(rounded + at) = bits;
    }
    return;
  }
  for (int64_t i = at; i < n && i < at + kWide; ++i) {
    weights[i] = update(c, gradients[i], weights[i], m[i], v[i]);
    if (rounded != nullptr) rounded[i] = to_bfloat16_device(weights[i]);
  }
}

}  // namespace

void adamw_step(StreamHandle stream, const AdamWStep& step, int64_t n, const float* gradients, float* weights,
                float* m, float* v, BFloat16* rounded) {
  check(step.step >= 1 && n >= 0, "the steps of AdamW count from 1");
  if (n == 0) return;
  const NvtxRange range("adamw");
  const auto t = static_cast<double>(step.step);
  // rate * (m / c1) / (sqrt(v / c2) + epsilon), with the corrections taken out.
  const double root2 = std::sqrt(1 - std::pow(step.beta2, t));
  const Constants c{static_cast<float>(step.beta1),
                    static_cast<float>(step.beta2),
                    static_cast<float>(1 - step.beta1),
                    static_cast<float>(1 - step.beta2),
                    static_cast<float>(step.gradient_scale),
                    static_cast<float>(step.learning_rate * root2 / (1 - std::pow(step.beta1, t))),
                    static_cast<float>(step.epsilon * root2),
                    static_cast<float>(1 - step.learning_rate * step.weight_decay)};
  uintptr_t places = reinterpret_cast<uintptr_t>(rounded) * 2;
  for (const float* data : {gradients, static_cast<const float*>(weights), static_cast<const float*>(m),
                            static_cast<const float*>(v)})
    places |= reinterpret_cast<uintptr_t>(data);
  const bool aligned = places % 16 == 0;
  const int64_t threads = aligned ? (n + 3) / 4 : n, blocks = (threads + kThreads - 1) / kThreads;
  check(blocks <= INT32_MAX, "the parameters of one call fit one grid");
  const auto kernel = aligned ? adamw_kernel<true> : adamw_kernel<false>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(c, n, gradients, weights, m, v, rounded);
  check_launch("adamw", stream);
}

}  // namespace longhalo

#include "kernels/swiglu/swiglu_simd.hpp"

#include "kernels/common/simd.hpp"

namespace longhalo::LONGHALO_ISA {
namespace {

LONGHALO_INLINE Float gated(Float gate, Float up) {
  return gate / (exp_lanes(-gate) + 1.0F) * up;
}

void row(int64_t ffn, const float* gate, const float* up, float* out) {
  int64_t c = 0;
  for (; c + kLanes <= ffn; c += kLanes)
    store(out + c, gated(load(gate + c), load(up + c)));
  if (c < ffn) store_part(out + c, ffn - c, gated(load_part(gate + c, ffn - c), load_part(up + c, ffn - c)));
}

struct Gradient {
  Float gate, up;
};

LONGHALO_INLINE Gradient gradient_of(Float gate, Float up, Float d_out) {
  const Float exponential = exp_lanes(-gate);
  const Float s = 1.0F / (exponential + 1.0F);
  // 1 - s, which would lose its digits as a difference. An exponential of 1e37 and more times its s is 1 too.
  const Float rest = exponential * s;
  return {d_out * up * s * (gate * rest + 1.0F), d_out * gate * s};
}

void gradient(int64_t ffn, const float* gate, const float* up, const float* d_out, float* d_gate,
              float* d_up) {
  int64_t c = 0;
  for (; c + kLanes <= ffn; c += kLanes) {
    const Gradient g = gradient_of(load(gate + c), load(up + c), load(d_out + c));
    store(d_gate + c, g.gate);
    store(d_up + c, g.up);
  }
  if (c < ffn) {
    const int64_t rest = ffn - c;
    const Gradient g =
        gradient_of(load_part(gate + c, rest), load_part(up + c, rest), load_part(d_out + c, rest));
    store_part(d_gate + c, rest, g.gate);
    store_part(d_up + c, rest, g.up);
  }
}

}  // namespace

extern const SwigluKernels swiglu_kernels{row, gradient};

}  // namespace longhalo::LONGHALO_ISA

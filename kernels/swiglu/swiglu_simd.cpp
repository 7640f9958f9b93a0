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

}  // namespace

extern const SwigluKernels swiglu_kernels{row};

}  // namespace longhalo::LONGHALO_ISA

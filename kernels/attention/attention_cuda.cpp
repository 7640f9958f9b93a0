// Chooses the GPU kernel by the device's compute capability and the number of queries.
#include "kernels/attention/attention_cuda.hpp"

#include "device/device.hpp"
#include "device/nvtx.hpp"
#include "kernels/attention/attention_checks.hpp"

namespace longhalo {
namespace {

AttentionKernel choose(const Attention<BFloat16>& p) {
  if (p.queries <= kGpuDecodeQueries) return AttentionKernel::kDecode;
  return current_device_info().is_hopper() ? AttentionKernel::kHopper : AttentionKernel::kPortable;
}

}  // namespace

void attention_forward(StreamHandle stream, const Attention<BFloat16>& p, AttentionKernel kernel) {
  check_attention(p);
  check(p.head_dim == 64 || p.head_dim == 128, "the GPU's attention takes head dimension 64 or 128");
  for (const BandKeys<BFloat16>& keys : p.bands)
    check(keys.row_stride == 0 || (keys.row_stride >= p.kv_heads * p.head_dim && keys.row_stride % 8 == 0),
          "rows of keys are 16-byte aligned and do not overlap");
  check(p.position == nullptr || p.queries <= kGpuDecodeQueries, "a position in device memory is for decode");
  if (p.queries == 0) return;
  const NvtxRange range("attention");
  switch (kernel == AttentionKernel::kAutomatic ? choose(p) : kernel) {
    case AttentionKernel::kHopper:
      check(current_device_info().is_hopper(), "the Hopper kernel runs on compute capability 9.0");
      return attention_hopper(stream, p);
    case AttentionKernel::kDecode:
      check(p.queries <= kGpuDecodeQueries, "the decode kernel takes few queries");
      return attention_gpu_decode(stream, p);
    default:
      return attention_portable(stream, p);
  }
}

}  // namespace longhalo

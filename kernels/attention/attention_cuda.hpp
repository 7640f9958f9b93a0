// The GPU kernels behind attention_forward(stream, ...), one file each. The caller has checked the problem.
#pragma once

#include "kernels/attention/attention.hpp"

namespace longhalo {

/// sm_90a: TMA, mbarriers, wgmma (attention_hopper.cu).
void attention_hopper(StreamHandle stream, const Attention<BFloat16>& problem);
/// sm_80 and later: cp.async, mma.sync (attention_portable.cu).
void attention_portable(StreamHandle stream, const Attention<BFloat16>& problem);
/// sm_80 and later, at most kGpuDecodeQueries queries: split over keys, merged by lse
/// (attention_gpu_decode.cu).
void attention_gpu_decode(StreamHandle stream, const Attention<BFloat16>& problem);

}  // namespace longhalo

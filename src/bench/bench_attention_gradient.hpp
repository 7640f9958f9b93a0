// The gradient's part of `longhalo bench attention --backward` on a GPU: its arrays, one run of it, and what
// tells that it is right.
#pragma once

#include <vector>

#include "device/device_buffer.hpp"
#include "kernels/attention/attention_backward.hpp"

namespace longhalo {

class AttentionGradientRun {
 public:
  /// `forward` stays as it is, and what it points to; its out and lse need not be there yet. d_out is random.
  AttentionGradientRun(cudaStream_t stream, const Attention<BFloat16>& forward);

  /// One gradient, queued. dk and dv grow with each run.
  void run(AttentionKernel kernel, bool deterministic);

  /// Runs forward, then the gradient by `kernel` and, in fixed order, by the portable one (which the tests
  /// hold against fp64): the relative Frobenius difference of sampled rows of dq and of every band's dk and
  /// dv.
  double difference_from_portable(AttentionKernel kernel, bool deterministic);

 private:
  struct Samples {
    std::vector<double> values;
  };
  Samples sampled_run(AttentionKernel kernel, bool deterministic);

  cudaStream_t stream_;
  DeviceBuffer<BFloat16> d_out_, dq_;
  std::vector<DeviceBuffer<float>> key_gradients_;  // by band, [count, 2, H_kv, d]
  DeviceBuffer<float> d_bias_;
  DeviceBuffer<unsigned char> workspace_;
  std::vector<BandGradient<BFloat16>> d_bands_;
  AttentionGradient<BFloat16> gradient_;
};

}  // namespace longhalo

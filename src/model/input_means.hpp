// The means of what the matrices of an fp8 model multiply (fp8.hpp), found while its weights are loaded:
// tokens like those that will be read go through each layer while it is still in bf16.
//
// Any mean is right, so it costs nothing but time that these tokens are few and see only each other. The
// first ones, which attention leans on and whose activations are like no others', do not count.
#pragma once

#include <cstdint>
#include <map>
#include <span>

#include "model/device_layer.hpp"
#include "model/engine.hpp"

namespace longhalo {

class InputMeans {
 public:
  /// `weights` have their embedding and must outlive this. Of `tokens`, one at least and all inside the
  /// vocabulary, the first kCalibrationTokens are taken. The host waits.
  InputMeans(const DeviceWeights& weights, std::span<const int32_t> tokens, cudaStream_t stream);

  /// Sends the tokens through the next layer, `index` of `weights`, and gives its matrices, all in bf16,
  /// their mean and bias. The host waits.
  void find(DeviceLayerWeights& layer, int64_t index);

 private:
  struct Mean {
    DeviceBuffer<BFloat16> mean, bias;
    float largest = 0;
  };

  Mean mean_of(const DeviceMatrix& w, int64_t n, const BFloat16* a);

  cudaStream_t stream_;
  int64_t tokens_, counted_;
  DeviceMatmul matmul_;
  DeviceLayer layer_;
  DeviceBuffer<BFloat16> residual_;  // [n, D]
  DeviceBuffer<BFloat16> kv_;        // [n, 2, H_kv, d]
  DeviceBuffer<BFloat16> ones_;      // [n, 8]: 1 in the first column where a token counts, else 0
};

}  // namespace longhalo

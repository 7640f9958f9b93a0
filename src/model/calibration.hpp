// What makes an fp8 model exact enough: while its weights are loaded, tokens like those that will be read go
// through each layer, still in bf16, and its matrices are quantised for what they multiplied there. The mean
// of that is taken off before it is rounded and the rounding errors of its outliers are kept (fp8.hpp), and
// weights are rounded for its covariance (quantize_for_inputs.hpp).
//
// Any mean and any rounding is right, so it costs nothing but time that these tokens are few and see only
// each other. The first ones, which attention leans on and whose activations are like no others', do not
// count.
#pragma once

#include <cstdint>
#include <map>
#include <span>

#include "model/device_layer.hpp"
#include "model/engine.hpp"

namespace longhalo {

class Calibration {
 public:
  /// `weights` have their embedding and must outlive this. Of `tokens`, one at least and all inside the
  /// vocabulary, the first kCalibrationTokens are taken. The host waits.
  Calibration(const DeviceWeights& weights, std::span<const int32_t> tokens, cudaStream_t stream);

  /// At most, of GPU memory, for so many tokens and while it quantises.
  static int64_t bytes(const ModelConfig& config, int64_t tokens);

  /// Sends the tokens through the next layer, `index`, all of it in bf16, and quantises `matrices` of it. The
  /// host waits.
  void quantise(int64_t index, std::span<DeviceMatrix* const> matrices);

 private:
  struct Inputs {
    DeviceBuffer<BFloat16> mean, covariance, bias;
    DeviceBuffer<int32_t> outliers;
  };

  Inputs inputs_of(const DeviceMatrix& w, const BFloat16* a);
  void quantise(DeviceMatrix& w, Inputs inputs);

  cudaStream_t stream_;
  int64_t tokens_;
  DeviceMatmul matmul_;
  DeviceLayer layer_;
  DeviceBuffer<BFloat16> residual_;  // [n, D]
  DeviceBuffer<BFloat16> kv_;        // [n, 2, H_kv, d]
};

}  // namespace longhalo

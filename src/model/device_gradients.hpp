// The gradients of all weights in the memory of this rank's GPU: ONE fp32 array in the order of
// parameters_of() (parameters.hpp), in which backward is done with them, so that optimizer and reduction walk
// it by stretches and know nothing of layers.
#pragma once

#include <cstdint>
#include <vector>

#include "device/device_buffer.hpp"
#include "model/device_weights.hpp"

namespace longhalo {

/// Where a layer's gradients lie; shapes as in LayerWeights.
struct DeviceLayerGradients {
  float *attention_norm, *q, *k, *v, *o, *mlp_norm, *gate_up, *down, *landmark_bias;
  std::vector<float*> landmark_query;  // per strided band, where the weights have them
};

class DeviceGradients {
 public:
  /// Of the weights of `like`, whose matrices are in bf16. Uninitialised: clear() before the first step.
  DeviceGradients(const DeviceWeights& like, cudaStream_t stream);

  float* data() { return all_.data(); }
  const float* data() const { return all_.data(); }
  int64_t elements() const { return all_.size(); }
  /// Elements in front of which all is final when backward is done with the loss, and with this layer.
  int64_t done_after_loss() const { return after_loss_; }
  int64_t done_after_layer(int64_t layer) const { return after_layer_[static_cast<size_t>(layer)]; }

  const DeviceLayerGradients& layer(int64_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  float* embedding() const { return embedding_; }
  float* final_norm() const { return final_norm_; }
  /// Of the head: the embedding's, where they are tied.
  float* head() const { return head_; }

  void clear(cudaStream_t stream);

 private:
  DeviceBuffer<float> all_;
  std::vector<DeviceLayerGradients> layers_;
  std::vector<int64_t> after_layer_;
  int64_t after_loss_ = 0;
  float *embedding_ = nullptr, *final_norm_ = nullptr, *head_ = nullptr;
};

}  // namespace longhalo

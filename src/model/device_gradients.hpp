// The gradients of all weights in the memory of this rank's GPU, in fp32, by sections
// (device_parameters.hpp).
//
// Few layers need memory for their gradients at once: backward is done with one after the other, and what is
// reduced over the ranks is kept by its owners alone (DeviceOptimizer). So layers may take turns.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "device/device_buffer.hpp"
#include "model/device_parameters.hpp"

namespace longhalo {

/// Where a layer's gradients lie; shapes as in LayerWeights.
struct DeviceLayerGradients {
  float *attention_norm, *q, *k, *v, *o, *mlp_norm, *gate_up, *down, *landmark_bias;
  std::vector<float*> landmark_query;  // per strided band, where the weights have them
};

/// What the caller of a backward pass does with gradients while it goes on. Either may be empty.
struct SectionHooks {
  /// Before anything that adds to the section is queued on the compute stream. Sections that share memory
  /// come one after the other.
  std::function<void(int64_t section)> begin;
  /// All of it is queued.
  std::function<void(int64_t section)> done;
};

class DeviceGradients {
 public:
  /// Of the weights of `like`, which must outlive this. Layers l and l + `layers_at_once` share memory.
  /// Uninitialised.
  DeviceGradients(DeviceWeights& like, int64_t layers_at_once, cudaStream_t stream);

  const std::vector<DeviceSection>& sections() const { return sections_; }
  float* section(int64_t index) { return places_[static_cast<size_t>(index)]; }
  /// Of what backward of the layer adds to.
  const DeviceLayerGradients& layer(int64_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  float* embedding() const { return embedding_; }
  float* final_norm() const { return final_norm_; }
  /// Of the head: the embedding's, where they are tied.
  float* head() const { return head_; }

  void clear_section(int64_t index, cudaStream_t stream);
  /// All of them.
  void clear(cudaStream_t stream);

  /// All gradients in the order of parameters_of(), where no memory is shared. The host waits.
  std::vector<float> to_host(cudaStream_t stream);

 private:
  std::vector<DeviceSection> sections_;
  DeviceBuffer<float> all_;
  std::vector<float*> places_;  // [sections]
  std::vector<DeviceLayerGradients> layers_;
  float *embedding_ = nullptr, *final_norm_ = nullptr, *head_ = nullptr;
};

}  // namespace longhalo

// The learned arrays of a model on the GPU as a list of sections, in the order in which backward is done with
// their gradients (parameters.hpp has the same list of the CPU's): head and final norm, the layers from the
// last to the first, the embedding. A section is what is reduced over ranks at once; in it every array begins
// at a multiple of 8 elements, as matrix products and vector accesses want it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/device_weights.hpp"
#include "model/parameters.hpp"

namespace longhalo {

struct DeviceParameter {
  std::string name;  // as parameters_of() calls it
  int64_t flat = 0;  // first element among all elements of parameters_of()
  int64_t at = 0;    // first element in its section
  int64_t size = 0;
  Decay decay = Decay::kNo;
  BFloat16* matrix = nullptr;  // where its values are: either this
  float* vector = nullptr;     // or this
};

struct DeviceSection {
  std::vector<DeviceParameter> parameters;
  int64_t size = 0;  // elements, with what lies between arrays; a multiple of 8
};

/// [layers + 2]. Pointers into `weights`, whose matrices are in bf16.
std::vector<DeviceSection> sections_of(DeviceWeights& weights);

/// Gives every layer its landmark queries, 0 (a mean) where the checkpoint has none, so that they can learn.
void add_landmark_queries(DeviceWeights& weights, int64_t strided_bands, cudaStream_t stream);

/// The section of a layer; 0 is head and final norm, the last one the embedding.
inline int64_t section_of_layer(const ModelConfig& config, int64_t layer) {
  return config.layers - layer;
}

}  // namespace longhalo

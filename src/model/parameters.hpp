// The learned arrays of a model as a list, in the order in which backward is done with their gradients: final
// norm, layers from the last to the first, embedding. Optimizer, gradient reduction and checkpoints walk this
// list; only the layers know what an array means.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/weights.hpp"

namespace longhalo {

/// Whether weight decay pulls a parameter to 0: matrices, but not norms and landmark vectors.
enum class Decay { kNo, kYes };

struct Parameter {
  std::string name;  // "model.layers.3.self_attn.q_proj.weight"
  std::span<float> values;
  Decay decay = Decay::kNo;
};

std::vector<Parameter> parameters_of(Weights& weights);
int64_t elements_of(const std::vector<Parameter>& parameters);

/// Gives every layer its landmark queries, 0 (a mean) where the checkpoint has none, so that they can learn.
void add_landmark_queries(Weights& weights, int64_t strided_bands);

/// Arrays of the same shapes, all 0: gradients.
Weights zeros_like(const Weights& weights);

/// Copies between `flat` and elements [begin, begin + flat.size()) of the parameters laid one after the
/// other.
void copy_from_parameters(const std::vector<Parameter>& parameters, int64_t begin, std::span<float> flat);
void copy_to_parameters(const std::vector<Parameter>& parameters, int64_t begin, std::span<const float> flat);

/// Calls visit(parameter, first element in `range`, first in the parameter, count) for every parameter that
/// elements [begin, end) touch.
template <class Visit>
void for_each_parameter(const std::vector<Parameter>& parameters, int64_t begin, int64_t end,
                        const Visit& visit) {
  int64_t first = 0;
  for (const Parameter& parameter : parameters) {
    const auto size = static_cast<int64_t>(parameter.values.size());
    const int64_t from = begin > first ? begin : first;
    const int64_t to = end < first + size ? end : first + size;
    if (from < to) visit(parameter, from - begin, from - first, to - from);
    first += size;
  }
}

}  // namespace longhalo

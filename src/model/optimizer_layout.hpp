// Where an optimizer that is spread over ranks keeps its state: which of all elements are this rank's, and
// where in its arrays. Checkpoints are written and read by it, on whichever device the arrays are.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "model/bucket_plan.hpp"

namespace longhalo {

/// Elements of the flat order of parameters_of() that lie one after the other in this rank's arrays.
struct OwnedElements {
  ElementRange flat;
  int64_t at = 0;  // of the first one, in the arrays
};

struct OptimizerLayout {
  /// What is reduced over the ranks at once: all elements, range after range.
  std::vector<ElementRange> groups;
  /// In order; those of a group follow each other without gaps in the flat order.
  std::vector<OwnedElements> owned;

  int64_t elements() const { return groups.empty() ? 0 : groups.back().end; }
};

/// The arrays, where the rank computes.
struct OptimizerArrays {
  float* master = nullptr;
  float* first_moment = nullptr;
  float* second_moment = nullptr;
};

/// Copies between the host's memory and the memory of arrays; done when it returns.
using CopyBytes = std::function<void(void* to, const void* from, int64_t bytes)>;

}  // namespace longhalo

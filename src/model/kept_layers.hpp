// The layers whose inputs the forward pass keeps for the backward pass: floor(i * every), i = 0, 1, ... With
// every = 2 each second one, with 1.25 four of five. What lies between two of them is made again from the
// first, as a group.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/error.hpp"

namespace longhalo {

class KeptLayers {
 public:
  /// every >= 1.
  KeptLayers(int64_t layers, double every) : layers_(layers) {
    check(every >= 1, "at most every layer's input is kept");
    for (int64_t i = 0;; ++i) {
      const auto layer = static_cast<int64_t>(std::floor(static_cast<double>(i) * every));
      if (layer >= layers) break;
      kept_.push_back(layer);
    }
  }

  int64_t count() const { return static_cast<int64_t>(kept_.size()); }
  /// In order.
  const std::vector<int64_t>& all() const { return kept_; }
  bool keeps(int64_t layer) const { return std::binary_search(kept_.begin(), kept_.end(), layer); }
  /// Which one `layer`, kept, is.
  int64_t slot(int64_t layer) const {
    return std::lower_bound(kept_.begin(), kept_.end(), layer) - kept_.begin();
  }
  /// The first layer behind the group that begins with the kept layer of this slot.
  int64_t end(int64_t slot) const {
    return slot + 1 < count() ? kept_[static_cast<size_t>(slot + 1)] : layers_;
  }
  /// Layers of the largest group.
  int64_t longest() const {
    int64_t most = 0;
    for (int64_t slot = 0; slot < count(); ++slot)
      most = std::max(most, end(slot) - kept_[static_cast<size_t>(slot)]);
    return most;
  }

 private:
  int64_t layers_;
  std::vector<int64_t> kept_;
};

}  // namespace longhalo

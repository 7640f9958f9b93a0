// How long the GPU spends in each phase of the layers, told by events between the phases: nothing waits for
// the measurement, and the events are taken in as the device passes them.
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "device/stream.hpp"
#include "model/prefill_cost.hpp"

namespace longhalo {

enum class Phase { kNone, kKeys, kQueries, kAttention, kMlp };

class PhaseClock {
 public:
  explicit PhaseClock(cudaStream_t stream) : stream_(stream) {}

  /// What is queued on the stream from here to the next call belongs to `phase`; kNone counts nowhere.
  void enter(Phase phase);
  /// Waits for the device. Seconds of all phases that were left by now.
  LayerTimes times();

 private:
  struct Mark {
    Phase phase;
    Event event;
  };
  void take_oldest();

  cudaStream_t stream_;
  std::deque<Mark> marks_;  // in stream order; a phase lasts from its mark to the next
  std::vector<Event> spare_;
  std::array<double, 5> seconds_{};
};

}  // namespace longhalo

// The host queues work faster than the device does it. This bounds how far it runs ahead, so that a launch
// queue never fills and progress stays honest, and tells of the work that the device has DONE.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "device/stream.hpp"

namespace longhalo {

class RunAhead {
 public:
  /// At most `most` portions are queued and not done. `report` is called with the work done so far.
  RunAhead(cudaStream_t stream, size_t most, std::function<void(int64_t done)> report)
      : stream_(stream), most_(most), report_(std::move(report)) {}

  /// Everything queued on the stream up to here completes a portion of `work`. Waits while too many are
  /// queued.
  void queued(int64_t work);
  /// Waits for all of it.
  void finish();

 private:
  struct Portion {
    int64_t work;
    Event done;
  };
  void take_oldest();

  cudaStream_t stream_;
  size_t most_;
  std::function<void(int64_t)> report_;
  std::deque<Portion> portions_;
  std::vector<Event> spare_;
  int64_t done_ = 0;
};

}  // namespace longhalo

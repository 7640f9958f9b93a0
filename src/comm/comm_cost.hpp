// What communication moved, and how long this rank stood waiting for it.
#pragma once

#include <cstdint>

namespace longhalo {

struct CommCost {
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
  double exposed_seconds = 0;
  double transfer_seconds = 0;  // on the GPU path, where it was timed: from start to end, hidden or not

  CommCost& operator+=(const CommCost& other) {
    sent_bytes += other.sent_bytes;
    received_bytes += other.received_bytes;
    exposed_seconds += other.exposed_seconds;
    transfer_seconds += other.transfer_seconds;
    return *this;
  }
};

}  // namespace longhalo

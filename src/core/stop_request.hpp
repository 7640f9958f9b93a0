// Ends a job that was asked to stop before it began: nothing is wrong, and the same command begins it.
#pragma once

#include <stdexcept>

namespace longhalo {

/// ExitCode::kRequeue.
class StopRequest : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace longhalo

// MPI calls at their places in streams: each step runs as a host function, on a thread of CUDA's, when its
// stream gets there. Steps run one after the other in the order they were queued, whatever their streams, so
// that all ranks meet in the same order.
//
// A step must not call CUDA. One that fails keeps its words for check(); the steps after it do nothing, so
// that the streams run on and the main thread gets to hear of it.
#pragma once

#include <mpi.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "device/stream.hpp"

namespace longhalo {

class HostSteps {
 public:
  /// Returns MPI_SUCCESS or the code of the MPI call that failed.
  using Work = std::function<int()>;

  HostSteps() : failure_(std::make_shared<Failure>()) {}
  HostSteps(const HostSteps&) = delete;
  HostSteps& operator=(const HostSteps&) = delete;

  /// `what` names the work in the message of its failure.
  void queue(const char* what, Work work, cudaStream_t stream);
  /// Throws InvariantError with MPI's words when a step has failed.
  void check() const;

 private:
  struct Failure {
    std::atomic<bool> happened{false};
    std::mutex mutex;
    std::string words;
  };
  struct Step {
    const char* what = nullptr;
    Work work;
    std::shared_ptr<Failure> failure;
    std::atomic<bool> done{false};
  };
  static void run(void* step) noexcept;

  std::shared_ptr<Failure> failure_;
  std::deque<std::unique_ptr<Step>> steps_;  // those that CUDA may still want to run
  Event last_;
};

}  // namespace longhalo

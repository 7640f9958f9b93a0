// Work queued once and replayed as a whole: one launch for the hundreds of kernels of a decode step.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <utility>

namespace longhalo {

class Graph {
 public:
  Graph() = default;
  /// Captures what `queue` queues on `stream` without running it. `queue` must not wait, allocate or release
  /// device memory, and every address it uses must stay valid and mean the same at every launch.
  Graph(cudaStream_t stream, const std::function<void()>& queue);
  ~Graph();
  Graph(Graph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(executable_, other.executable_);
    return *this;
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  bool empty() const { return executable_ == nullptr; }
  void launch(cudaStream_t stream) const;

 private:
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace longhalo

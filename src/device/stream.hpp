// Streams and events, owned. A stream is a queue of device work; an event marks a place in one, for another
// stream to wait for or for measuring time. Neither makes the host wait unless asked to.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

namespace longhalo {

enum class Timing { kOff, kOn };
enum class StreamPriority { kNormal, kHigh };

class Event {
 public:
  explicit Event(Timing timing = Timing::kOff);
  ~Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream);
  /// Makes `stream` (not the host) wait until what was recorded is done.
  void make_wait(cudaStream_t stream) const;
  /// Makes the host wait.
  void synchronize() const;
  bool done() const;

 private:
  cudaEvent_t event_ = nullptr;
};

/// Seconds between two events that were both recorded and are done; both with Timing::kOn.
double seconds_between(const Event& from, const Event& to);

class Stream {
 public:
  explicit Stream(StreamPriority priority = StreamPriority::kNormal);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }
  operator cudaStream_t() const { return stream_; }  // NOLINT(google-explicit-constructor): it stands for one
  /// Makes the host wait for all work queued so far.
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace longhalo

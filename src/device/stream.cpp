#include "device/stream.hpp"

#include "core/waiting.hpp"
#include "device/cuda_check.hpp"

namespace longhalo {

Event::Event(Timing timing) {
  const unsigned flags = timing == Timing::kOn ? cudaEventDefault : cudaEventDisableTiming;
  check_cuda(cudaEventCreateWithFlags(&event_, flags), "creating an event");
}

Event::~Event() {
  if (event_ != nullptr) log_cuda_failure(cudaEventDestroy(event_), "destroying an event");
}

void Event::record(cudaStream_t stream) {
  check_cuda(cudaEventRecord(event_, stream), "recording an event");
}

void Event::make_wait(cudaStream_t stream) const {
  check_cuda(cudaStreamWaitEvent(stream, event_, 0), "making a stream wait for an event");
}

void Event::synchronize() const {
  const Waiting waiting("this rank's GPU, for an event");
  check_cuda(cudaEventSynchronize(event_), "waiting for an event");
}

bool Event::done() const {
  const cudaError_t code = cudaEventQuery(event_);
  if (code == cudaErrorNotReady) return false;
  check_cuda(code, "asking for an event");
  return true;
}

double seconds_between(const Event& from, const Event& to) {
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, from.get(), to.get()), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

Stream::Stream(StreamPriority priority) {
  int least = 0, greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking,
                                          priority == StreamPriority::kHigh ? greatest : least),
             "creating a stream");
}

Stream::~Stream() {
  if (stream_ != nullptr) log_cuda_failure(cudaStreamDestroy(stream_), "destroying a stream");
}

void Stream::synchronize() const {
  wait_for_stream(stream_, "a stream of this rank's GPU");
}

}  // namespace longhalo

// How long work on the GPU takes: warm-up, then samples between CUDA events, queued without waiting so that
// the GPU never stands still between them. Several runs of short work make one sample.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "bench/timed_runs.hpp"

namespace longhalo {

/// `work(run)` queues one run on `stream`; run counts from 0 through warm-up and samples, for inputs that
/// rotate. `repeats` samples. The host waits until all is done.
TimedRuns time_on_device(cudaStream_t stream, int64_t repeats, const std::function<void(int64_t run)>& work);

/// How many copies of inputs of `bytes` rotate so that none of a run's reads finds them in the L2 cache of
/// the current device.
int64_t rotating_copies(int64_t bytes);

}  // namespace longhalo

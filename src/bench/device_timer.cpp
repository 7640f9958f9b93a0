#include "bench/device_timer.hpp"

#include <algorithm>

#include "core/clock.hpp"
#include "device/cuda_check.hpp"
#include "device/device.hpp"
#include "device/stream.hpp"

namespace longhalo {
namespace {

constexpr double kWarmUpSeconds = 0.2;   // clocks and power settle
constexpr double kSampleSeconds = 2e-3;  // much longer than the resolution of events and a launch
constexpr int64_t kMostRunsPerSample = 200;
constexpr int64_t kLeastWarmUpRuns = 3;
constexpr int64_t kMostCopies = 64;

}  // namespace

TimedRuns time_on_device(cudaStream_t stream, int64_t repeats, const std::function<void(int64_t run)>& work) {
  const auto wait = [&] { check_cuda(cudaStreamSynchronize(stream), "waiting for a benchmark"); };
  int64_t run = 0;
  work(run++);  // loads modules, chooses algorithms
  wait();
  const Stopwatch warm_up;
  int64_t warm_runs = 0;
  do {
    work(run++);
    ++warm_runs;
    wait();
  } while (warm_runs < kLeastWarmUpRuns || warm_up.seconds() < kWarmUpSeconds);
  const double about = warm_up.seconds() / static_cast<double>(warm_runs);
  const int64_t inner =
      std::clamp(static_cast<int64_t>(kSampleSeconds / about), int64_t{1}, kMostRunsPerSample);

  std::vector<Event> events;
  events.reserve(static_cast<size_t>(repeats) + 1);
  for (int64_t i = 0; i <= repeats; ++i)
    events.emplace_back(Timing::kOn);
  work(run++);  // keeps the GPU busy until the first sample is queued behind it
  events.front().record(stream);
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    for (int64_t i = 0; i < inner; ++i)
      work(run++);
    events[static_cast<size_t>(repeat) + 1].record(stream);
  }
  wait();
  std::vector<double> samples;
  for (int64_t i = 0; i < repeats; ++i) {
    const auto at = static_cast<size_t>(i);
    samples.push_back(seconds_between(events[at], events[at + 1]) / static_cast<double>(inner));
  }
  return summary_of(std::move(samples));
}

int64_t rotating_copies(int64_t bytes) {
  const int64_t wanted = 3 * current_device_info().l2_bytes;
  return std::clamp(wanted / std::max<int64_t>(bytes, 1) + 1, int64_t{1}, kMostCopies);
}

}  // namespace longhalo

// Times of repeated runs of the same work, as benchmarks report them; the CPU's clock. device_timer.hpp has
// the GPU's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "comm/mpi_session.hpp"
#include "core/clock.hpp"
#include "core/error.hpp"

namespace longhalo {

/// Seconds of one run.
struct TimedRuns {
  double median_seconds = 0;
  double min_seconds = 0;
};

/// Of at least one sample.
inline TimedRuns summary_of(std::vector<double> samples) {
  check(!samples.empty(), "a time is the median of at least one sample");
  std::sort(samples.begin(), samples.end());
  return {samples[samples.size() / 2], samples.front()};
}

/// Runs work() once to warm up and `repeats` times for the clock, each time after prepare() and with all
/// ranks starting together. Collective.
template <class Prepare, class Work>
TimedRuns time_on_cpu(const MpiSession& session, int64_t repeats, const Prepare& prepare, const Work& work) {
  std::vector<double> samples;
  for (int64_t repeat = 0; repeat <= repeats; ++repeat) {
    prepare();
    wait_for_all(session);
    const Stopwatch watch;
    work();
    if (repeat > 0) samples.push_back(watch.seconds());
  }
  return summary_of(std::move(samples));
}

/// `error`, or infinity where it is not finite: a NaN would be lost in the largest over ranks.
inline double finite_or_infinite(double error) {
  return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

}  // namespace longhalo

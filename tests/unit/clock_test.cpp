// The system's clock is set while a job runs, as a time server does after a boot with a wrong one. This
// program stands in for the C library's clock_gettime(), so that its own clock can be set and nobody else's.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "app/job_end.hpp"
#include "app/signals.hpp"
#include "core/clock.hpp"

namespace {
time_t clock_is_set_by = 0;
}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += clock_is_set_by;
  return result;
}

namespace longhalo {
namespace {

int64_t system_seconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

TEST(AClockThatIsSet, ChangesNoTimeOfAJob) {
  constexpr int64_t kDay = 86400;
  const int64_t start = system_seconds();
  ::setenv("SLURM_JOB_END_TIME", std::to_string(start + 1000).c_str(), 1);
  JobSignals::reserve_before_end(100);
  const JobSignals signals;
  const Stopwatch watch;
  EXPECT_FALSE(JobSignals::asked_to_stop());
  for (const int64_t by : {kDay, -kDay, int64_t{950}}) {
    clock_is_set_by = by;
    ASSERT_NEAR(static_cast<double>(system_seconds() - start), static_cast<double>(by), 60) << "it is set";
    EXPECT_NEAR(now_seconds(), static_cast<double>(start), 60);
    EXPECT_LT(watch.seconds(), 60);
    EXPECT_FALSE(JobSignals::asked_to_stop()) << "by " << by;
  }
  clock_is_set_by = 0;
  ::unsetenv("SLURM_JOB_END_TIME");
}

}  // namespace
}  // namespace longhalo

// When a job sees its end, and what its signals do.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "app/job_end.hpp"
#include "app/signals.hpp"

namespace longhalo {
namespace {

TEST(JobEnd, IsNearWhenTheReserveWouldBeUsedUp) {
  JobEnd end(1000, 50, 0);
  for (double now = 100; now < 920; now += 30)
    EXPECT_FALSE(end.is_near(now)) << now;
  EXPECT_TRUE(end.is_near(940)) << "a step of 30 s more would leave less than the reserve";
  EXPECT_DOUBLE_EQ(end.left(940), 60);
}

TEST(JobEnd, TheLongestStepCounts) {
  JobEnd end(1000, 50, 0);
  for (const double now : {10.0, 110.0, 111.0, 112.0})
    EXPECT_FALSE(end.is_near(now));
  EXPECT_FALSE(end.is_near(200));
  EXPECT_FALSE(end.is_near(299));
  EXPECT_TRUE(end.is_near(850)) << "the last step of 551 s shows that the next may be as long";
  JobEnd of_short_steps(1000, 50, 0);
  for (double now = 1; now < 949; now += 1)
    EXPECT_FALSE(of_short_steps.is_near(now));
  EXPECT_TRUE(of_short_steps.is_near(949));
  EXPECT_TRUE(of_short_steps.is_near(949)) << "and stays";
}

TEST(JobEnd, AutoKeepsTwoMinutesOrATenth) {
  JobEnd of_a_day(86400, {}, 0);
  EXPECT_FALSE(of_a_day.is_near(86400 - 121));
  JobEnd again(86400, {}, 0);
  EXPECT_TRUE(again.is_near(86400 - 120));
  JobEnd of_a_minute(1060, {}, 1000);
  EXPECT_FALSE(of_a_minute.is_near(1053));
  JobEnd of_another(1060, {}, 1000);
  EXPECT_TRUE(of_another.is_near(1054));
}

TEST(JobEnd, WhatSavingTakesIsKeptWhereNothingElseIsSaid) {
  JobEnd end(86400, {}, 0), given(86400, 50, 0);
  for (JobEnd* each : {&end, &given}) {
    each->saving_takes(400);
    each->saving_takes(300);
  }
  JobEnd before = end;
  EXPECT_FALSE(before.is_near(86400 - 801));
  EXPECT_TRUE(end.is_near(86400 - 800)) << "twice the longest";
  EXPECT_FALSE(given.is_near(86400 - 51));
}

TEST(JobEnd, WithoutAnEndItIsNeverNear) {
  JobEnd none({}, 50, 0), over(1000, 50, 1000);
  for (const double now : {0.0, 999.0, 1000.0, 1e12}) {
    EXPECT_FALSE(none.is_near(now));
    EXPECT_FALSE(over.is_near(now)) << "an end that was over at the start is not this job's";
  }
}

TEST(JobEnd, OfTheEnvironment) {
  ::setenv("SLURM_JOB_END_TIME", "1700000000", 1);
  EXPECT_EQ(job_end_of_environment(), 1700000000.0);
  for (const char* no_time : {"", "soon", "17 ", "1e9", "99999999999999999999"}) {
    ::setenv("SLURM_JOB_END_TIME", no_time, 1);
    EXPECT_FALSE(job_end_of_environment()) << no_time;
  }
  ::unsetenv("SLURM_JOB_END_TIME");
  EXPECT_FALSE(job_end_of_environment());
}

TEST(JobEnd, WhatIsNoTimeIsSaidOnce) {
  const auto said = [](const char* value, Say say) {
    ::setenv("SLURM_JOB_END_TIME", value, 1);
    ::testing::internal::CaptureStderr();
    { const JobSignals signals(say); }
    ::unsetenv("SLURM_JOB_END_TIME");
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_NE(said("soon", Say::kYes).find("warning: SLURM_JOB_END_TIME is 'soon', no seconds since 1970"),
            std::string::npos);
  for (const char* fine : {"", "1700000000"})
    EXPECT_EQ(said(fine, Say::kYes), "") << fine;
  EXPECT_EQ(said("soon", Say::kNo), "") << "another rank says it";
  EXPECT_LT(said(std::string(100000, 'x').c_str(), Say::kYes).size(), 400u);
}

TEST(JobSignals, TheEndOfTheJobIsARequestToStop) {
  const auto end_in = [](int64_t seconds) {
    ::setenv("SLURM_JOB_END_TIME", std::to_string(static_cast<int64_t>(now_seconds()) + seconds).c_str(), 1);
  };
  JobSignals::reserve_before_end(100);
  end_in(1000);
  {
    const JobSignals signals;
    EXPECT_FALSE(JobSignals::asked_to_stop());
  }
  end_in(90);
  {
    const JobSignals signals;
    EXPECT_TRUE(JobSignals::asked_to_stop());
    EXPECT_FALSE(JobSignals::take_asked_to_save());
  }
  ::unsetenv("SLURM_JOB_END_TIME");
  const JobSignals signals;
  EXPECT_FALSE(JobSignals::asked_to_stop()) << "another job, which has no end";
}

// How a process ends that gets SIGTERM after `work`: its exit code, or 128 + the signal.
int ended_with(void (*work)()) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGTERM, SIG_DFL);  // whatever the tests before this one left
    work();
    ::raise(SIGTERM);
    ::_exit(75);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(JobSignals, AJobThatHasEndedKeepsItsExitCode) {
  EXPECT_EQ(ended_with([] {}), 128 + SIGTERM) << "SIGTERM ends other processes";
  EXPECT_EQ(ended_with([] { const JobSignals signals; }), 75);
}

}  // namespace
}  // namespace longhalo

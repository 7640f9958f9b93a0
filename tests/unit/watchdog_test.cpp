// What a process says of its waiting, and the end of one that waits for too long.
#include "comm/watchdog.hpp"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <thread>

#include "core/error.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"

namespace longhalo {
namespace {

constexpr int kHungCode = static_cast<int>(ExitCode::kHung);

void pause(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

TEST(Waiting, SaysWhatBeganFirstAndWhatEndedLast) {
  at_work("step", 12);
  EXPECT_EQ(work_state().place, "step 12");
  at_layer(5);
  EXPECT_EQ(work_state().place, "step 12, layer 5");
  EXPECT_FALSE(work_state().longest);
  const std::array<int, 2> ranks{4, 1};
  uint64_t number = 0;
  {
    const Waiting outer("a halo", ranks);
    {
      const Waiting inner("an agreement");
      const WorkState state = work_state();
      ASSERT_TRUE(state.longest);
      EXPECT_STREQ(state.longest->operation, "a halo");
      EXPECT_EQ(state.longest->ranks, std::vector<int>({4, 1}));
      number = state.longest->number;
    }
    EXPECT_EQ(work_state().last, text("#", number + 1, ", an agreement"));
    EXPECT_EQ(work_state().longest->number, number);
  }
  EXPECT_FALSE(work_state().longest);
  EXPECT_EQ(work_state().last, text("#", number, ", a halo"));
  at_work("step", 13);
  EXPECT_EQ(work_state().place, "step 13") << "the layer is the last step's";
}

TEST(Waiting, OfSeveralThreads) {
  const Waiting here("here");
  std::thread([] {
    const Waiting there("there");
    EXPECT_STREQ(work_state().longest->operation, "here");
  }).join();
  EXPECT_STREQ(work_state().longest->operation, "here");
}

TEST(Waiting, QuietSinceSomethingBeganOrEnded) {
  at_layer(1);
  pause(0.05);
  EXPECT_GE(work_state().quiet_seconds, 0.05);
  at_layer(2);
  EXPECT_LT(work_state().quiet_seconds, 0.05);
}

// Death tests run in a process of their own; it ends by _Exit, or with 0 where nobody ended it.
template <class Work>
void watched(double deadline, bool told_to_end, const Work& work) {
  set_deadline_seconds(deadline);
  const Watchdog watchdog(3, "here", [told_to_end] { return told_to_end; });
  work();
  std::_Exit(0);
}

TEST(WatchdogDeathTest, EndsWhatWaitsForTooLong) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(watched(0.2, false,
                      [] {
                        at_work("step", 7);
                        at_layer(2);
                        const std::array<int, 3> ranks{0, 1, 2};
                        const Waiting waiting("a halo of keys", ranks);
                        pause(20);
                      }),
              ::testing::ExitedWithCode(kHungCode),
              "nothing moves: waited [0-9.]+ s for ranks 0, 1 and 2 in operation #1, a halo of keys; step 7, "
              "layer 2\n.*where:  rank 3 on host here\n.*run.deadline_seconds");
}

TEST(WatchdogDeathTest, LetsWorkAndShortWaitsBe) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(watched(0.5, false,
                      [] {
                        for (int i = 0; i < 8; ++i) {
                          const Waiting waiting("a short one");
                          pause(0.1);
                        }
                        pause(0.8);  // computing
                      }),
              ::testing::ExitedWithCode(0), "^$");
  EXPECT_EXIT(watched(0, false,
                      [] {
                        const Waiting waiting("for ever");
                        pause(0.5);
                      }),
              ::testing::ExitedWithCode(0), "^$");
}

TEST(WatchdogDeathTest, WaitsForWorkThatIsKnownToTakeLong) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(watched(0.2, false,
                      [] {
                        {
                          const MorePatience patience(60);
                          const Waiting waiting("the model to be written");
                          pause(0.8);
                        }
                        const Waiting waiting("what comes after it");
                        pause(20);
                      }),
              ::testing::ExitedWithCode(kHungCode), "what comes after it");
}

TEST(WatchdogDeathTest, EndsWhenACheckFails) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(watched(10, false,
                      [] {
                        const HealthCheck good([] { return std::string(); });
                        const HealthCheck check([] { return std::string("the link is down"); });
                        pause(20);
                      }),
              ::testing::ExitedWithCode(kHungCode), "the link is down; before the first step");
}

TEST(WatchdogDeathTest, WhoStandsStillSpeaksWhenToldToEnd) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      watched(4, true,
              [] {
                at_work("document", 2);
                { const Waiting waiting("an agreement"); }
                pause(1.6);
              }),
      ::testing::ExitedWithCode(0),
      "told to end at document 2, where nothing has moved for 1[.0-9]* s: computing, or at a file; its "
      "last operation was #1, an agreement");
}

}  // namespace
}  // namespace longhalo

// A job killed at any moment of writing a checkpoint leaves a good one, and the next job cleans up after it.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>

#include "checkpoint_fixture.hpp"
#include "core/clock.hpp"
#include "core/log.hpp"
#include "scratch.hpp"

namespace longhalo {
namespace {

using namespace testing;

int count_folders(const std::filesystem::path& directory) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    count += entry.is_directory();
  return count;
}

// Runs `body` in a process of its own, which has to end by _exit() or a signal; returns its exit code.
int in_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    set_log_level(LogLevel::kError);
    try {
      body();
    } catch (const std::exception& error) {
      log_error(error.what());
      ::_exit(99);
    }
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Writes checkpoint 3 over `ranks` threads and dies at the k-th point of the order, counted over all ranks.
void write_and_die(const std::filesystem::path& place, int ranks, int k) {
  std::atomic<int> passed{0};
  ThreadRanks(ranks).run([&](const RankAgreement& agreement) {
    CheckpointOptions options;
    options.observe = [&](std::string_view) {
      if (passed++ == k) ::_exit(42);
    };
    CheckpointWriter writer(place, agreement, options);
    write_checkpoint(writer, 3, agreement.rank, ranks);
  });
}

// A killed process loses nothing that the kernel holds, so a disk in memory shows the same and is quick.
void use_memory_disk() {
  if (::access("/dev/shm", W_OK) == 0) ::setenv("TMPDIR", "/dev/shm", 1);
}

TEST(CheckpointKill, AtEveryPointOfTheOrder) {
  set_log_level(LogLevel::kError);
  use_memory_disk();
  for (const int ranks : {1, 2}) {
    const ScratchFolder folder;
    ThreadRanks(ranks).run([&](const RankAgreement& agreement) {
      CheckpointWriter writer(folder / "two", agreement);
      write_checkpoint(writer, 1, agreement.rank, ranks);
      write_checkpoint(writer, 2, agreement.rank, ranks);
    });
    bool before_commit = true;
    int points = 0;
    for (int code = 42; code == 42; ++points) {
      std::filesystem::remove_all(folder / "run");
      std::filesystem::copy(folder / "two", folder / "run", std::filesystem::copy_options::recursive);
      code = in_child([&] { write_and_die(folder / "run", ranks, points); });
      ASSERT_TRUE(code == 42 || code == 0) << code;
      const auto found = find_checkpoint(folder / "run", RankAgreement::alone());
      ASSERT_TRUE(found);
      EXPECT_TRUE(found->skipped.empty()) << "nothing half-written is taken for a checkpoint";
      SmallJob::expect_right(*found, 0, 1);
      if (found->manifest.step == 3) before_commit = false;
      EXPECT_EQ(found->manifest.step, before_commit ? 2 : 3) << "committed once, committed for good";
      // The next job goes on, with another number of ranks.
      CheckpointWriter writer(folder / "run", RankAgreement::alone());
      write_checkpoint(writer, 4);
      EXPECT_EQ(count_folders(folder / "run"), 2) << "no half-written folder stays; point " << points;
      SmallJob::expect_right(*find_checkpoint(folder / "run", RankAgreement::alone()), 0, 1);
    }
    EXPECT_FALSE(before_commit);
    EXPECT_EQ(points - 1, ranks == 1 ? 13 : 19) << "every point of the order was one to die at";
  }
}

// The same step again, as a job does that went back: no moment without a good checkpoint.
TEST(CheckpointKill, WhileACheckpointOfTheSameStepIsReplaced) {
  set_log_level(LogLevel::kError);
  use_memory_disk();
  const ScratchFolder folder;
  {
    CheckpointWriter writer(folder / "one", RankAgreement::alone());
    write_checkpoint(writer, 3);
  }
  for (int point = 0, code = 42; code == 42; ++point) {
    std::filesystem::remove_all(folder / "run");
    std::filesystem::copy(folder / "one", folder / "run", std::filesystem::copy_options::recursive);
    code = in_child([&] { write_and_die(folder / "run", 1, point); });
    const auto found = find_checkpoint(folder / "run", RankAgreement::alone());
    ASSERT_TRUE(found) << point;
    SmallJob::expect_right(*found, 0, 1);
  }
}

TEST(CheckpointKill, AtRandomMoments) {
  set_log_level(LogLevel::kError);
  use_memory_disk();
  const ScratchFolder folder;
  std::mt19937 random(std::random_device{}());
  int64_t last = 1;
  const Stopwatch clock;
  ThreadRanks(2).run([&](const RankAgreement& agreement) {
    CheckpointWriter writer(folder.path(), agreement);
    write_checkpoint(writer, last, agreement.rank, 2);
  });
  const double one_checkpoint = clock.seconds();
  std::uniform_real_distribution<double> moment(0, 2.5 * one_checkpoint);
  for (int round = 0; round < 50; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        ThreadRanks(2).run([&](const RankAgreement& agreement) {
          CheckpointWriter writer(folder.path(), agreement);
          for (int64_t step = last + 1;; ++step)
            write_checkpoint(writer, step, agreement.rank, 2);
        });
      } catch (...) {
      }
      ::_exit(99);
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(moment(random)));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "it wrote until it was killed";
    const auto found = find_checkpoint(folder.path(), RankAgreement::alone());
    ASSERT_TRUE(found);
    EXPECT_TRUE(found->skipped.empty());
    EXPECT_GE(found->manifest.step, last) << "what was committed stays";
    last = found->manifest.step;
    SmallJob::expect_right(*found, 0, 1);
  }
  EXPECT_GT(last, 1) << "some checkpoint was finished in fifty rounds";
}

}  // namespace
}  // namespace longhalo

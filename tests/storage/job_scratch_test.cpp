// The folder for activations that jobs of one user share: what dead jobs left goes, what is another's stays,
// and one that cannot be used is said before a job makes anything.
#include "storage/job_scratch.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "core/text.hpp"
#include "scratch.hpp"
#include "small_store.hpp"
#include "storage/disk_activation_store.hpp"
#include "storage/posix.hpp"

namespace longhalo {
namespace {

using namespace testing;

TEST(JobScratch, RemovesFoldersOfTheDeadAndNoOthers) {
  const ScratchFolder folder;
  const DiskActivationStore living(small_options(folder.path()));
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    auto* const left = new JobScratch(folder.path(), "dead/../job", 1);
    write_text(left->path() / "activations.h5", std::string(1000, 'x'));
    [[maybe_unused]] const ssize_t put = ::write(pipe_ends[1], "x", 1);
    ::pause();
  }
  char ready = 0;
  ASSERT_EQ(::read(pipe_ends[0], &ready, 1), 1);
  const auto folders = [&] {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      count += entry.is_directory();
    return count;
  };
  {
    const DiskActivationStore another(small_options(folder.path()));
    EXPECT_EQ(folders(), 3) << "the child lives, and so does the first store";
  }
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  ::close(pipe_ends[0]);
  ::close(pipe_ends[1]);
  std::filesystem::create_directory(folder / "longhalo-activations@elsewhere@1@rank0@7-0");
  std::filesystem::create_directory(folder / "the_users_own");
  EXPECT_EQ(folders(), 4);
  const DiskActivationStore next(small_options(folder.path()));
  EXPECT_EQ(folders(), 4) << "one removed, one made";
  EXPECT_TRUE(std::filesystem::exists(living.file()));
  EXPECT_TRUE(std::filesystem::exists(folder / "the_users_own"));
}

TEST(JobScratch, NamesUnusableDirectories) {
  const ScratchFolder folder;
  write_text(folder / "file", "x");
  expect_user_error([&] { DiskActivationStore store(small_options(folder / "file")); },
                    {"cannot be made", "activations.directory"});
  expect_user_error([&] { DiskActivationStore store(small_options(folder / "file/deeper")); },
                    {"cannot be made", "deeper"});
}

// Whoever plans a job asks before; a job would have said the same.
TEST(JobScratch, IsAskedForBeforeAStoreIsMade) {
  const ScratchFolder folder;
  namespace fs = std::filesystem;
  JobScratch::require_usable(folder / "a/b", DeadFolders::kRemove);
  JobScratch::require_usable(folder.path(), DeadFolders::kRemove);
  EXPECT_EQ(count_files(folder.path()), 0);
  write_text(folder / "file", "x");
  fs::create_directory(folder / "locked");
  fs::create_symlink("nowhere", folder / "locked" / text(".longhalo-activations.", ::geteuid(), ".lock"));
  fs::create_directory(folder / "barred");
  fs::create_directory(folder / "barred" / text(".longhalo-activations.", ::geteuid(), ".lock"));
  fs::create_directory(folder / "piped");
  const fs::path pipe = folder / "piped" / text(".longhalo-activations.", ::geteuid(), ".lock");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const auto& [name, words] :
       {std::pair{"file", "the folder for activations cannot be made: a file of that name"},
        {"file/deeper", "/file is no folder"},
        {"locked", "a link has the name of the file by which jobs keep out of each other's way"},
        {"barred", "a folder has the name of the file by which jobs keep out of each other's way"},
        {"piped", "a pipe, socket or device has the name of the file by which"}}) {
    std::string reason;
    try {
      JobScratch::require_usable(folder / name, DeadFolders::kLeave);
    } catch (const UserError& error) {
      reason = error.what();
    }
    EXPECT_NE(reason.find(words), std::string::npos) << reason;
    expect_user_error([&, &name = name] { DiskActivationStore store(small_options(folder / name)); },
                      {reason.c_str()});
  }
  fs::create_directory(folder / "dead");
  const fs::path left = folder / "dead" / text("longhalo-activations@", host_name(), "@job@rank0@1-0");
  fs::create_directory(left);
  JobScratch::require_usable(folder / "dead", DeadFolders::kLeave);
  EXPECT_TRUE(fs::exists(left));
  JobScratch::require_usable(folder / "dead", DeadFolders::kRemove);
  EXPECT_FALSE(fs::exists(left));
}

}  // namespace
}  // namespace longhalo

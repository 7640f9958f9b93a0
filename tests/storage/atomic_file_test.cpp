// Files that appear whole or not at all, and the checksums that prove it.
#include "storage/atomic_file.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <random>
#include <span>
#include <thread>
#include <vector>

#include "scratch.hpp"
#include "storage/checksum.hpp"
#include "storage/folder_lock.hpp"
#include "storage/job_scratch.hpp"
#include "storage/posix.hpp"
#include "storage/report_file.hpp"
#include "storage/sha256.hpp"

namespace longhalo {
namespace {

using namespace testing;

TEST(AtomicFile, ReplacesWholeFiles) {
  const ScratchFolder folder;
  const std::filesystem::path file = folder / "a.txt";
  write_file_atomically(file, "first");
  EXPECT_EQ(read_text(file), "first");
  const std::string large(3'000'001, 'x');
  write_file_atomically(file, large);
  EXPECT_EQ(read_text(file), large);
  write_file_atomically(file, "");
  EXPECT_EQ(read_text(file), "");
  EXPECT_EQ(count_files(folder.path()), 1);
}

TEST(AtomicFile, KeepsTheOldFileWhenTheDiskIsFull) {
  const TinyDisk disk;
  if (!disk.reason().empty()) GTEST_SKIP() << disk.reason();
  const std::filesystem::path file = disk / "a.txt";
  write_file_atomically(file, "old");
  expect_user_error([&] { write_file_atomically(file, std::string(2 << 20, 'x')); },
                    {"No space left", "2097152 bytes needed", "bytes free", file.string()});
  EXPECT_EQ(read_text(file), "old");
  EXPECT_EQ(count_files(disk.path()), 1);
  expect_user_error([&] { require_space(file, 2 << 20); }, {"2097152 bytes needed"});
  require_space(file, 1 << 19);
  EXPECT_LE(free_bytes(file), 1 << 20);
  EXPECT_LE(free_bytes(disk / "not/yet/made"), 1 << 20);
}

TEST(AtomicFile, SpeaksOfRoomWhereRoomIsMissingAlone) {
  const ScratchFolder folder;
  expect_user_error([&] { throw_write_error(ENOSPC, folder / "a", 100); },
                    {"100 bytes needed", "bytes free"});
  const std::string barred =
      expect_user_error([&] { throw_write_error(EACCES, folder / "a", 100); }, {"denied"});
  EXPECT_EQ(barred.find("bytes"), std::string::npos) << barred;
}

TEST(AtomicFile, KeepsTheOldFileAtTheSizeLimit) {
  const ScratchFolder folder;
  const std::filesystem::path file = folder / "a.txt";
  write_file_atomically(file, "old");
  {
    const FileSizeLimit limit(1000);
    expect_user_error([&] { write_file_atomically(file, std::string(2000, 'x')); },
                      {"2000 bytes needed", "ulimit -f"});
  }
  EXPECT_EQ(read_text(file), "old");
  EXPECT_EQ(count_files(folder.path()), 1);
}

TEST(AtomicFile, NamesUnusableTargets) {
  const ScratchFolder folder;
  expect_user_error([&] { write_file_atomically(folder / "absent/a.txt", "x"); },
                    {"No such file", "absent/a.txt"});
  std::filesystem::create_directory(folder / "folder");
  expect_user_error([&] { write_file_atomically(folder / "folder", "x"); }, {"directory", "folder"});
  write_text(folder / "file", "x");
  expect_user_error([&] { write_file_atomically(folder / "file/a.txt", "x"); }, {"Not a directory"});
  EXPECT_EQ(count_files(folder.path()), 1);
}

TEST(AtomicFile, RemovesOnlyAbandonedTemporaries) {
  const ScratchFolder folder;
  const TemporaryFile living(folder / "mine.h5");
  write_text(living.path(), "in work");
  // A child that ends without cleaning up, as a killed job does.
  const pid_t child = ::fork();
  if (child == 0) {
    const TemporaryFile orphan(folder / "orphan.h5");
    write_text(orphan.path(), "half");
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  write_text(folder / "notes.tmp.txt", "the user's own");
  write_text(folder / "x.tmp.elsewhere.7-0", "of another host, fresh");
  EXPECT_EQ(count_files(folder.path()), 4);
  EXPECT_EQ(remove_abandoned_temporaries(folder.path(), Abandoned::kWriterGone), 1);
  EXPECT_TRUE(std::filesystem::exists(living.path()));
  EXPECT_EQ(remove_abandoned_temporaries(folder.path(), Abandoned::kAll), 2);
  EXPECT_EQ(count_files(folder.path()), 1);
  EXPECT_EQ(remove_abandoned_temporaries(folder / "absent", Abandoned::kAll), 0);
}

TEST(Checksum, DependsOnBytesNotOnPieces) {
  std::mt19937 random(7);
  std::vector<std::byte> bytes(257);
  for (std::byte& byte : bytes)
    byte = static_cast<std::byte>(random());
  Checksum64 whole;
  whole.update(bytes);
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    Checksum64 parts;
    parts.update(std::span(bytes).first(cut));
    parts.update(std::span(bytes).subspan(cut));
    ASSERT_EQ(parts.value(), whole.value()) << cut;
  }
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      bytes[at] ^= static_cast<std::byte>(1 << bit);
      Checksum64 changed;
      changed.update(bytes);
      ASSERT_NE(changed.value(), whole.value());
      bytes[at] ^= static_cast<std::byte>(1 << bit);
    }
  }
  // Zeros of different lengths differ: a file cut short or padded is seen.
  Checksum64 seven;
  Checksum64 eight;
  seven.update(std::vector<std::byte>(7));
  eight.update(std::vector<std::byte>(8));
  EXPECT_NE(seven.value(), eight.value());
}

TEST(AtomicFile, NothingTakesThePlaceOfADevice) {
  const ScratchFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink("/dev/null", folder / "link");
  for (const char* name : {"pipe", "link"})
    expect_user_error([&] { write_file_atomically(folder / name, "text"); },
                      {"device, pipe or socket", name});
  EXPECT_TRUE(std::filesystem::is_fifo(folder / "pipe"));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
}

// What stdout leads to may be a plain file; the link itself is everybody's.
TEST(AtomicFile, NothingTakesThePlaceOfAnOpenFile) {
  const ScratchFolder folder;
  write_file_atomically(folder / "file", "old");
  const InputFile open = open_input(folder / "file");
  const std::string number = std::to_string(open.descriptor.get());
  std::filesystem::create_symlink("/proc/self/fd/" + number, folder / "stdout");
  std::filesystem::create_symlink("stdout", folder / "far");
  std::filesystem::create_symlink("/proc/self/fd", folder / "fd");
  std::filesystem::create_symlink("file", folder / "plain");
  for (const std::string& name : {std::string("stdout"), std::string("far"), "fd/" + number}) {
    expect_user_error([&] { write_file_atomically(folder / name, "new"); }, {"open already", name});
    expect_user_error([&] { require_replaceable(folder / name); }, {"open already", name});
    EXPECT_TRUE(std::filesystem::is_symlink(folder / name));
  }
  write_file_atomically(folder / "plain", "new");
  EXPECT_EQ(read_text(folder / "plain"), "new");
  EXPECT_EQ(read_text(folder / "file"), "old");
}

// Each takes the lock of the folder, whose file the holder before may just have removed.
TEST(JobScratch, ManyAtOnceAreOfTheirOwnAndLeaveNothing) {
  const ScratchFolder folder;
  std::vector<std::jthread> makers;
  for (int thread = 0; thread < 8; ++thread)
    makers.emplace_back([&] {
      for (int i = 0; i < 20; ++i)
        EXPECT_TRUE(std::filesystem::is_directory(JobScratch(folder.path(), "job", 0).path()));
    });
  makers.clear();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

// An earlier report, whichever command's, makes way for a new one; nothing else does.
TEST(ReportFile, TakesThePlaceOfReportsAlone) {
  const ScratchFolder folder;
  const auto report = folder / "report.json";
  require_report_place({});
  require_report_place(report);
  for (const char* contents : {"", R"({"bands": [], "benchmark": "halo"})", R"({"doctor": "pass"})"}) {
    write_text(report, contents);
    require_report_place(report);
  }
  for (const char* contents : {R"({"doctor": {"json": "x.json"}, "benchmark": 1})", R"({"benchmark": "ha)",
                               R"(["benchmark"])", R"("doctor")", "{}", "run: {log: x}\n", "\x89HDF\r\n"}) {
    write_text(report, contents);
    expect_user_error([&] { require_report_place(report); },
                      {"no report of longhalo", "report.json", "--json"});
    EXPECT_EQ(read_text(report), contents);
  }
  std::filesystem::create_symlink("report.json", folder / "link");
  expect_user_error([&] { require_report_place(folder / "link"); }, {"no report of longhalo"});
  expect_user_error([&] { require_report_place(folder / "none" / "x.json"); }, {"No such file"});
}

TEST(ReportFile, AnEarlierOneThatCannotBeReadIsToldOfAsSuch) {
  const ScratchFolder folder;
  write_text(folder / "report.json", R"({"doctor": "pass"})");
  std::filesystem::permissions(folder / "report.json", std::filesystem::perms::owner_write);
  std::filesystem::permissions(folder.path(), std::filesystem::perms::all);
  {
    const AsNobody nobody;
    expect_user_error([&] { require_report_place(folder / "report.json"); },
                      {"cannot be read: Permission denied", "report.json"});
  }
  std::filesystem::resize_file(folder / "report.json", (uintmax_t{256} << 20) + 1);
  std::filesystem::permissions(folder / "report.json", std::filesystem::perms::owner_all);
  expect_user_error([&] { require_report_place(folder / "report.json"); }, {"the right file", "report.json"});
}

TEST(ReportFile, GoesThroughLinksIntoTheFile) {
  namespace fs = std::filesystem;
  const ScratchFolder folder;
  fs::create_directory(folder / "far");
  write_text(folder / "far" / "report.json", R"({"doctor": "pass"})");
  fs::create_symlink("far/second", folder / "first");
  fs::create_symlink(folder / "far" / "report.json", folder / "far" / "second");
  fs::create_symlink("far/new.json", folder / "to be made");
  for (const char* name : {"first", "to be made"}) {
    require_report_place(folder / name);
    publish_report(folder / name, R"({"doctor": "fail"})", "");
    EXPECT_TRUE(fs::is_symlink(folder / name)) << name;
  }
  EXPECT_TRUE(fs::is_symlink(folder / "far" / "second"));
  for (const char* name : {"report.json", "new.json"})
    EXPECT_EQ(read_text(folder / "far" / name), R"({"doctor": "fail"})") << name;
  EXPECT_EQ(count_files(folder.path()), 5) << "two files and three links; no temporary one";
}

TEST(ReportFile, ALinkThatLeadsToNoPlaceForItIsSaidBefore) {
  namespace fs = std::filesystem;
  const ScratchFolder folder;
  fs::create_symlink("round", folder / "round");
  expect_user_error([&] { require_report_place(folder / "round"); }, {"Too many levels", "round"});
  fs::create_symlink("none/x.json", folder / "nowhere");
  expect_user_error([&] { require_report_place(folder / "nowhere"); }, {"No such file", "none/x.json"});
  fs::create_directory(folder / "shared");
  fs::permissions(folder / "shared", fs::perms::all);
  fs::create_symlink(folder / "x.json", folder / "shared" / "link");
  for (const auto& action :
       {require_report_place, +[](const fs::path& file) { publish_report(file, "{}", ""); }})
    expect_user_error([&] { action(folder / "shared" / "link"); },
                      {"a folder that everybody may write to", "shared/link"});
  EXPECT_FALSE(fs::exists(folder / "x.json"));
}

// The right to write into the folder is not enough.
TEST(AtomicFile, WhatStandsInPlaceForGoodIsSaidBefore) {
  namespace fs = std::filesystem;
  if (::geteuid() != 0) GTEST_SKIP() << "files of two users need root";
  const ScratchFolder folder;
  write_text(folder / "report.json", R"({"doctor": "pass"})");
  fs::create_directory(folder / "others");
  const auto require_all = [&] {
    require_replaceable(folder / "report.json");
    require_report_place(folder / "report.json");
    require_removable(folder / "others");
  };
  fs::permissions(folder.path(), fs::perms::all);
  {
    const AsNobody nobody;
    require_all();
  }
  fs::permissions(folder.path(), fs::perms::all | fs::perms::sticky_bit);
  require_all();
  {
    const AsNobody nobody;
    write_text(folder / "own", "x");
    require_replaceable(folder / "own");
    require_replaceable(folder / "new");
    for (const auto& action : {require_replaceable, require_report_place})
      expect_user_error([&] { action(folder / "report.json"); },
                        {"cannot be replaced: Operation not permitted", "report.json", "let its owner"});
    expect_user_error([&] { require_removable(folder / "others"); }, {"not permitted", "others"});
  }
  EXPECT_EQ(count_files(folder.path()), 2);
  EXPECT_TRUE(fs::is_directory(folder / "others")) << "asking takes nothing away";
}

TEST(AtomicFile, AMountInPlaceIsSaidBefore) {
  const TinyDisk disk;
  if (!disk.reason().empty()) GTEST_SKIP() << disk.reason();
  write_text(disk / "file", "old");
  ASSERT_EQ(::mount((disk / "file").c_str(), (disk / "file").c_str(), nullptr, MS_BIND, nullptr), 0);
  expect_user_error([&] { require_replaceable(disk / "file"); }, {"cannot be replaced", "busy", "findmnt"});
  EXPECT_EQ(read_text(disk / "file"), "old");
  ASSERT_EQ(::umount((disk / "file").c_str()), 0);
  require_replaceable(disk / "file");
}

TEST(AtomicFile, NotThroughALinkInAFolderForEverybody) {
  const ScratchFolder folder;
  std::filesystem::create_directory(folder / "shared");
  std::filesystem::permissions(folder / "shared", std::filesystem::perms::all);
  std::filesystem::create_directory(folder / "elsewhere");
  std::filesystem::create_directory_symlink(folder / "elsewhere", folder / "shared" / "out");
  expect_user_error([&] { write_file_atomically(folder / "shared" / "out" / "file", "text"); },
                    {"shared/out"});
  expect_user_error([&] { const FolderLock lock(folder / "shared" / "out"); }, {"shared/out"});
  EXPECT_TRUE(std::filesystem::is_empty(folder / "elsewhere"));
  // The last part is replaced and not followed.
  write_text(folder / "elsewhere" / "victim", "old");
  std::filesystem::create_symlink(folder / "elsewhere" / "victim", folder / "shared" / "file");
  write_file_atomically(folder / "shared" / "file", "new");
  EXPECT_EQ(read_text(folder / "elsewhere" / "victim"), "old");
  EXPECT_EQ(read_text(folder / "shared" / "file"), "new");
}

TEST(AtomicFile, TheUsersUmaskCounts) {
  const ScratchFolder folder;
  const mode_t before = ::umask(027);
  write_file_atomically(folder / "file", "text");
  ::umask(before);
  EXPECT_EQ(std::filesystem::status(folder / "file").permissions(), std::filesystem::perms::owner_read |
                                                                        std::filesystem::perms::owner_write |
                                                                        std::filesystem::perms::group_read);
}

TEST(Sha256, AgreesWithTheStandard) {
  // Digests of FIPS 180-4's examples.
  EXPECT_EQ(sha256_of_text("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_of_text(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_of_text("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256_of_text(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  const ScratchFolder folder;
  write_text(folder / "million", std::string(1'000'000, 'a'));
  EXPECT_EQ(sha256_of_file(folder / "million"), sha256_of_text(std::string(1'000'000, 'a')));
}

}  // namespace
}  // namespace longhalo

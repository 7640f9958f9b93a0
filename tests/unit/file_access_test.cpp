#include "core/file_access.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "../storage/scratch.hpp"
#include "core/json_depth.hpp"
#include "core/stop_request.hpp"

namespace longhalo {
namespace {

namespace fs = std::filesystem;
using testing::AsNobody;
using testing::expect_user_error;
using testing::ScratchFolder;
using testing::write_text;

TEST(ReadTextFile, GivesTheBytes) {
  const ScratchFolder folder;
  const std::string contents("a\0b\r\n", 5);
  write_text(folder / "file", contents);
  EXPECT_EQ(read_text_file(folder / "file", 5), contents);
  write_text(folder / "empty", "");
  EXPECT_EQ(read_text_file(folder / "empty", 5), "");
}

TEST(ReadTextFile, RefusesWhatIsNoFileOrTooLarge) {
  const ScratchFolder folder;
  write_text(folder / "file", "123456");
  expect_user_error([&] { read_text_file(folder / "file", 5); }, {"6 bytes", "5 are the most"});
  expect_user_error([&] { read_text_file(folder / "missing", 5); }, {"No such file", "missing"});
  expect_user_error([&] { read_text_file(folder.path(), 5); }, {"directory"});
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  expect_user_error([&] { read_text_file(folder / "pipe", 5); }, {"pipe"});  // would wait for ever
  expect_user_error([&] { read_text_file("/dev/zero", 5); }, {"device"});    // would never end
}

TEST(ReadStream, GivesWhatComesUntilTheEnd) {
  const ScratchFolder folder;
  write_text(folder / "file", "123456");
  EXPECT_EQ(read_stream(folder / "file", 100, nullptr), "123456");
  EXPECT_EQ(read_stream(folder / "file", 5, nullptr), "12345");
  EXPECT_EQ(read_stream("/dev/null", 5, nullptr), "");
  EXPECT_EQ(read_stream("/dev/zero", 5, nullptr), std::string(5, '\0'));
  expect_user_error([&] { read_stream(folder / "missing", 5, nullptr); }, {"No such file", "missing"});
  const fs::path pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::thread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(250));  // later than the reader looks first
    std::ofstream out(pipe);
    out << "first " << std::flush;
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    out << "second";
  });
  EXPECT_EQ(read_stream(pipe, 100, [] { return false; }), "first second");
  writer.join();
}

TEST(ReadStream, WaitsNoLongerThanItIsWanted) {
  const ScratchFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  int asked = 0;
  EXPECT_THROW(read_stream(folder / "pipe", 100, [&] { return ++asked == 3; }), StopRequest);
  EXPECT_EQ(asked, 3);
  write_text(folder / "file", "123456");
  EXPECT_EQ(read_stream(folder / "file", 100, [] { return true; }), "123456") << "what is there is no wait";
}

TEST(ReadJsonText, RefusesDeepNesting) {
  const ScratchFolder folder;
  const auto nested = [](int64_t depth) {
    const auto count = static_cast<size_t>(depth);
    return std::string(count, '[') + std::string(count, ']');
  };
  write_text(folder / "deep", nested(kMostJsonDepth + 1));
  write_text(folder / "most", nested(kMostJsonDepth));
  EXPECT_EQ(read_json_text(folder / "most", 1000), nested(kMostJsonDepth));
  expect_user_error([&] { read_json_text(folder / "deep", 1000); }, {"nested more than 64 deep"});
}

TEST(JsonDepth, CountsBracketsOutsideStrings) {
  EXPECT_EQ(json_depth("7"), 0);
  EXPECT_EQ(json_depth("[]"), 1);
  EXPECT_EQ(json_depth(R"({"a":[1,{"b":2}],"c":[]})"), 3);
  EXPECT_EQ(json_depth(R"(["[[[", "\"[[", "\\", ["{"]])"), 2);
  EXPECT_EQ(json_depth("[[["), 3);
}

TEST(RequireFolder, SaysWhyItCannotBeEntered) {
  const ScratchFolder folder;
  write_text(folder / "file", "text");
  require_folder(folder.path(), "the folder", "look");
  require_folder(".", "the folder", "look");
  expect_user_error([&] { require_folder(folder / "none", "the folder", "look"); },
                    {"the folder cannot be opened: No such file or directory", "none", "look"});
  expect_user_error([&] { require_folder("none", "the folder", "look"); }, {"this relative path starts at"});
  expect_user_error([&] { require_folder(folder / "file", "the folder", "look"); }, {"Not a directory"});
  fs::create_directory(folder / "shut");
  fs::permissions(folder / "shut", fs::perms::none);
  fs::permissions(folder.path(), fs::perms::others_exec, fs::perm_options::add);
  const AsNobody nobody;
  expect_user_error([&] { require_folder(folder / "shut", "the folder", "look"); }, {"Permission denied"});
}

// What cannot be made is said alike when it is made and when it is only asked for, with what is in the way.
TEST(MakeDirectory, SaysWhatIsInTheWay) {
  const ScratchFolder folder;
  write_text(folder / "file", "text");
  fs::create_symlink("nowhere", folder / "dangling");
  fs::create_symlink("file", folder / "to_file");
  fs::create_symlink("loop", folder / "loop");
  fs::create_directory(folder / "shut");
  fs::permissions(folder / "shut", static_cast<fs::perms>(0555));
  fs::permissions(folder.path(), fs::perms::others_exec, fs::perm_options::add);
  const auto in = [&](const char* name) { return (folder / name).string(); };
  const std::vector<std::pair<fs::path, std::string>> cases = {
      {folder / "file", "a file of that name is in its place"},
      {folder / "file" / "sub", in("file") + " is no folder"},
      {folder / "dangling", in("dangling") + " is a link that leads nowhere"},
      {folder / "dangling" / "sub" / "sub", in("dangling") + " is a link that leads nowhere"},
      {folder / "to_file", in("to_file") + " is a link to what is no folder"},
      {folder / "loop" / "sub", "Too many levels of symbolic links"}};
  for (const auto& [place, reason] : cases)
    for (const auto& make : {make_directory, require_makeable_directory})
      expect_user_error([&, &place = place] { make(place, "the folder", "look"); },
                        {("the folder cannot be made: " + reason).c_str(), place.c_str(), "look"});
  const AsNobody nobody;
  for (const auto& make : {make_directory, require_makeable_directory})
    expect_user_error([&] { make(folder / "shut" / "a" / "b", "the folder", "look"); },
                      {"the folder cannot be made: Permission denied", "shut/a/b"});
}

TEST(RequireMakeableDirectory, MakesNothing) {
  const ScratchFolder folder;
  require_makeable_directory(folder / "a" / "b", "the folder", "look");
  require_makeable_directory(folder.path(), "the folder", "look");
  EXPECT_TRUE(fs::is_empty(folder.path()));
  make_directory(folder / "a" / "b", "the folder", "look");
  EXPECT_TRUE(fs::is_directory(folder / "a" / "b"));
}

class SharedLink : public ::testing::Test {
 protected:
  SharedLink() {
    fs::create_directory(folder_ / "own");
    fs::create_directory(folder_ / "shared");
    fs::permissions(folder_ / "shared", fs::perms::all | fs::perms::sticky_bit);
    fs::create_directory(folder_ / "target");
  }
  ScratchFolder folder_;
};

TEST_F(SharedLink, RefusedInAFolderForEverybody) {
  fs::create_directory_symlink(folder_ / "target", folder_ / "shared" / "link");
  expect_user_error([&] { refuse_shared_link(folder_ / "shared" / "link"); }, {"shared/link", "everybody"});
  expect_user_error([&] { refuse_shared_link(folder_ / "shared" / "link" / "out" / "x"); }, {"shared/link"});
  fs::create_symlink(folder_ / "nowhere", folder_ / "shared" / "dangling");
  expect_user_error([&] { refuse_shared_link(folder_ / "shared" / "dangling"); }, {"shared/dangling"});
}

TEST_F(SharedLink, OtherLinksAndPathsAreFine) {
  fs::create_directory_symlink(folder_ / "target", folder_ / "own" / "link");
  refuse_shared_link(folder_ / "own" / "link" / "out");
  refuse_shared_link(folder_ / "shared" / "new" / "out");
  fs::create_directory(folder_ / "shared" / "mine");
  fs::create_directory_symlink(folder_ / "target", folder_ / "shared" / "mine" / "link");
  refuse_shared_link(folder_ / "shared" / "mine" / "link" / "out");
  refuse_shared_link("relative/path");
  refuse_shared_link("");
}

}  // namespace
}  // namespace longhalo

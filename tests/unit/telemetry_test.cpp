// Run log, progress lines, phase timer, process memory.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <functional>
#include <sstream>
#include <thread>
#include <vector>

#include "../storage/scratch.hpp"
#include "core/error.hpp"
#include "telemetry/memory.hpp"
#include "telemetry/progress.hpp"
#include "telemetry/run_log.hpp"

namespace longhalo {
namespace {

using namespace testing;
using nlohmann::json;

std::vector<std::string> lines_of(const std::string& contents) {
  std::vector<std::string> lines;
  std::istringstream in(contents);
  for (std::string line; std::getline(in, line);)
    lines.push_back(line);
  return lines;
}

RunHeader header_of(const std::string& command) {
  return {command, {{"window", 4096}}, {{"longhalo", "0.1.0"}, {"mpi", "x"}},
          2,       {"a", "b"},         {{"transport", "mpi"}}};
}

TEST(RunLog, FirstRecordIsTheHeader) {
  const ScratchFolder folder;
  {
    RunLog log(folder / "log.jsonl", header_of("infer"));
    log.write("step", {{"tokens", 5}});
    log.write("odd", {{"text", "bad \xff byte\nnew line"}});
  }
  { RunLog log(folder / "log.jsonl", header_of("infer")); }
  const std::vector<std::string> lines = lines_of(read_text(folder / "log.jsonl"));
  ASSERT_EQ(lines.size(), 4U);
  const json first = json::parse(lines[0]);
  EXPECT_EQ(first["event"], "run");
  EXPECT_EQ(first["command"], "infer");
  EXPECT_EQ(first["config"]["window"], 4096);
  EXPECT_EQ(first["versions"]["mpi"], "x");
  EXPECT_EQ(first["versions"]["compiler"], compiler_version());
  EXPECT_EQ(first["ranks"], 2);
  EXPECT_EQ(first["hosts"], (json{"a", "b"}));
  EXPECT_EQ(first["transport"], "mpi");
  EXPECT_EQ(first["started"].get<std::string>().size(), 24U);
  const json second = json::parse(lines[1]);
  EXPECT_EQ(second["tokens"], 5);
  EXPECT_GE(second["seconds"].get<double>(), 0);
  EXPECT_EQ(json::parse(lines[2])["text"], "bad \xef\xbf\xbd byte\nnew line");
  EXPECT_EQ(json::parse(lines[3])["event"], "run") << "a requeued job appends";
  RunLog().write("nowhere");
}

TEST(RunLog, CutsHalfALineOfAKilledRun) {
  const ScratchFolder folder;
  for (const std::string& torn : {std::string("{\"event\":\"st"), std::string(10000, 'x')}) {
    write_text(folder / "log.jsonl", "{\"event\":\"old\"}\n" + torn);
    { RunLog log(folder / "log.jsonl", header_of("infer")); }
    const std::vector<std::string> lines = lines_of(read_text(folder / "log.jsonl"));
    ASSERT_EQ(lines.size(), 2U);
    EXPECT_EQ(json::parse(lines[0])["event"], "old");
    EXPECT_EQ(json::parse(lines[1])["event"], "run");
  }
  for (const std::string& torn : {std::string("{\"ev"), "{\"event\":\"run" + std::string(5000, 'x')}) {
    write_text(folder / "log.jsonl", torn);
    { RunLog log(folder / "log.jsonl", header_of("infer")); }
    EXPECT_EQ(lines_of(read_text(folder / "log.jsonl")).size(), 1U);
  }
}

// With the constructor's words, and nothing is made.
TEST(RunLog, IsAskedForBeforeItIsMade) {
  const ScratchFolder folder;
  RunLog::require_usable(folder / "log.jsonl");
  std::filesystem::create_symlink("yet_to_be_made", folder / "link");
  RunLog::require_usable(folder / "link");
  RunLog::require_usable("/dev/null");
  EXPECT_FALSE(std::filesystem::exists(folder / "log.jsonl"));
  EXPECT_FALSE(std::filesystem::exists(folder / "yet_to_be_made"));
  { RunLog log(folder / "log.jsonl", header_of("infer")); }
  const std::string before = read_text(folder / "log.jsonl");
  RunLog::require_usable(folder / "log.jsonl");
  EXPECT_EQ(read_text(folder / "log.jsonl"), before);

  write_text(folder / "text", "a document");
  std::filesystem::create_symlink("none/log.jsonl", folder / "nowhere");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  const auto reason_of = [](const std::function<void()>& work) {
    try {
      work();
    } catch (const UserError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  for (const auto& [name, words] : {std::pair{"text", "no log of longhalo"},
                                    {"pipe", "a pipe cannot hold the run log"},
                                    {"text/log.jsonl", "opened for writing: Not a directory"},
                                    {"none/log.jsonl", "opened for writing: No such file"},
                                    {"nowhere", "opened for writing: No such file"},
                                    {".", "opened for writing: Is a directory"}}) {
    const std::filesystem::path file = folder / name;
    const std::string reason = reason_of([&] { RunLog::require_usable(file); });
    EXPECT_NE(reason.find(words), std::string::npos) << reason;
    EXPECT_EQ(reason, reason_of([&] { const RunLog log(file, header_of("infer")); }));
  }
  EXPECT_EQ(read_text(folder / "text"), "a document");
}

TEST(RunLog, LeavesAFileAloneThatIsNoLog) {
  const ScratchFolder folder;
  for (const char* contents : {"a document whose last line has no end", "{\"document\": 1}\n", "\n"}) {
    write_text(folder / "a.txt", contents);
    expect_user_error([&] { RunLog log(folder / "a.txt", header_of("infer")); }, {"no log", "a.txt"});
    EXPECT_EQ(read_text(folder / "a.txt"), contents);
  }
}

TEST(RunLog, AFileThatWasRemovedIsMadeAnew) {
  const ScratchFolder folder;
  const std::filesystem::path file = folder / "out" / "log.jsonl";
  std::filesystem::create_directory(folder / "out");
  RunLog log(file, header_of("train"));
  log.write("step", {{"step", 1}});
  std::filesystem::remove_all(folder / "out");
  log.write("step", {{"step", 2}});  // there is no folder for it
  std::filesystem::create_directory(folder / "out");
  log.write("step", {{"step", 3}});
  log.write("step", {{"step", 4}});
  const std::vector<std::string> lines = lines_of(read_text(file));
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(json::parse(lines[0])["step"], 3);
  EXPECT_EQ(json::parse(lines[1])["step"], 4);
}

TEST(RunLog, FullDiskLosesLinesButNeverHalfOfOne) {
  const ScratchFolder folder;
  expect_user_error([&] { RunLog log(folder / "absent/log.jsonl", header_of("infer")); },
                    {"absent/log.jsonl"});
  {
    RunLog log(folder / "log.jsonl", header_of("infer"));
    const FileSizeLimit limit(2000);
    for (int i = 0; i < 10; ++i)
      log.write("step", {{"text", std::string(300, 'x')}});
  }
  const std::string contents = read_text(folder / "log.jsonl");
  EXPECT_LE(contents.size(), 2000U);
  EXPECT_EQ(contents.back(), '\n');
  for (const std::string& line : lines_of(contents))
    EXPECT_TRUE(json::accept(line));
  EXPECT_GE(lines_of(contents).size(), 3U);
  const FileSizeLimit limit(10);
  expect_user_error([&] { RunLog log(folder / "new.jsonl", header_of("infer")); },
                    {"cannot be written", "new.jsonl"});
}

class ProgressTest : public ::testing::Test {
 protected:
  ProgressOptions options(ProgressStyle style) {
    descriptor_ = ::open((folder_ / "out").c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    return {style, 3600, 0, descriptor_};
  }
  std::string output() const { return read_text(folder_ / "out"); }
  ~ProgressTest() override { ::close(descriptor_); }
  ScratchFolder folder_;
  int descriptor_ = -1;
};

TEST_F(ProgressTest, LinesAreFewFirstAndLastAlways) {
  {
    Progress progress("prefill", 1000, ProgressUnit::kTokens, options(ProgressStyle::kAuto));
    for (int i = 0; i < 1000; ++i)
      progress.add(1);
    progress.finish();
    progress.add(1);
  }
  const std::vector<std::string> lines = lines_of(output());
  ASSERT_EQ(lines.size(), 2U) << output();
  EXPECT_EQ(lines[0], "prefill 0% 0/1.00k tokens");
  EXPECT_EQ(lines[1].rfind("prefill 100% 1.00k/1.00k tokens, ", 0), 0U) << lines[1];
}

TEST_F(ProgressTest, BarFillsAndFitsTheTerminal) {
  {
    Progress progress("reading", 100, ProgressUnit::kBytes, options(ProgressStyle::kBar));
    progress.set(50);
    progress.set(100);
  }
  const std::string drawn = output();
  EXPECT_EQ(drawn.back(), '\n');
  std::vector<std::string> frames;
  std::istringstream in(drawn);
  for (std::string frame; std::getline(in, frame, '\r');)
    frames.push_back(frame);
  ASSERT_EQ(frames.size(), 5U) << drawn;  // nothing, 0, 50, 100, the last state
  for (const std::string& frame : frames)
    EXPECT_LE(frame.size(), 80U + 3U);
  const auto filled = [](const std::string& frame) { return std::count(frame.begin(), frame.end(), '#'); };
  EXPECT_EQ(filled(frames[1]), 0);
  EXPECT_GT(filled(frames[2]), 5);
  EXPECT_GE(filled(frames[4]), 2 * filled(frames[2]) - 20);
  EXPECT_NE(frames[4].find("100%"), std::string::npos);
}

TEST_F(ProgressTest, ThreadsLoseNothingAndOffSaysNothing) {
  {
    Progress progress("x", -1, ProgressUnit::kSteps, options(ProgressStyle::kLines));
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 10000; ++i)
          progress.add(1);
      });
    }
    for (std::thread& thread : threads)
      thread.join();
  }
  EXPECT_NE(lines_of(output()).back().find("x 40.0k steps"), std::string::npos) << output();
  ::close(descriptor_);
  { Progress progress("x", 10, ProgressUnit::kSteps, options(ProgressStyle::kOff)); }
  EXPECT_EQ(output(), "");
}

TEST(ProgressText, SaysRateAndTimeLeft) {
  EXPECT_EQ(progress_text("p", 500'000, 1'000'000, ProgressUnit::kTokens, 10, false),
            "p 50% 500k/1.00M tokens, 50.0k tokens/s, 10.0s left");
  EXPECT_EQ(progress_text("p", 1, 3, ProgressUnit::kSteps, 60, true),
            "p 33% 1/3 steps, 0.017 steps/s, 1m00s");
  EXPECT_EQ(progress_text("p", 5, -1, ProgressUnit::kBytes, 2, false), "p 5B, 2.5B/s");
  EXPECT_EQ(progress_text("p", 0, 0, ProgressUnit::kSteps, 0, true), "p 0/0 steps, 0.0s");
  EXPECT_EQ(quantity_text(999.6e3, ProgressUnit::kBytes), "1.00MB");
  EXPECT_EQ(quantity_text(12.34e9, ProgressUnit::kTokens), "12.3G tokens");
  EXPECT_EQ(duration_text(59.9), "59.9s");
  EXPECT_EQ(duration_text(59.96), "1m00s");
  EXPECT_EQ(duration_text(3599.7), "1h00m");
  EXPECT_EQ(duration_text(2 * 3600 + 5 * 60), "2h05m");
}

TEST(ProcessMemory, SeesAnAllocation) {
  const ProcessMemory before = process_memory();
  std::vector<char> block(64 << 20, 1);
  const ProcessMemory after = process_memory();
  EXPECT_GE(after.anonymous - before.anonymous, 60 << 20);
  EXPECT_GE(after.peak_resident, after.resident);
  EXPECT_GE(after.resident, after.anonymous);
  EXPECT_GT(after.file, 0);
  EXPECT_EQ(block[12345], 1);
}

}  // namespace
}  // namespace longhalo

// Results of a job: whole records only, whatever happens to the job, and old results kept until new ones are
// ready. What becomes of their arrays: result_arrays_test.cpp.
#include "storage/results.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "results_fixture.hpp"
#include "scratch.hpp"
#include "storage/hdf5.hpp"

namespace longhalo {
namespace {

using namespace testing;
using nlohmann::json;

TEST(Results, WritesRecordsAndArrays) {
  const ScratchFolder folder;
  const std::filesystem::path out = folder / "deep/results";
  const std::vector<int32_t> tokens{5, 6, 7};
  const std::vector<float> scores{-1, -2, -3};
  const std::vector<float> embeddings{1, 2, 3, 4};
  {
    ResultWriter writer(out, IfResultsExist::kError);
    EXPECT_TRUE(writer.recorded().empty());
    const std::string one = writer.write_arrays("x/a b.txt", {tokens, scores, embeddings, 2});
    const std::string two = writer.write_arrays("y/a b.txt", {tokens, {}, {}, 0});
    EXPECT_NE(one, two);
    EXPECT_EQ(one.rfind("arrays/a_b.txt-", 0), 0U) << one;
    json record = record_of("x/a b.txt");
    record["arrays"] = one;
    writer.write(record);
    writer.write(record_of("bad \xff bytes", "and \xc3 here"));
    writer.finish();
  }
  const std::vector<json> records = records_in(out);
  ASSERT_EQ(records.size(), 2U);
  const Hdf5File arrays = Hdf5File::open(out / records[0]["arrays"].get<std::string>());
  EXPECT_EQ(arrays.string_attribute("document"), "x/a b.txt");
  EXPECT_EQ(arrays.dataset("embeddings").shape(), (std::vector<int64_t>{2, 2}));
  std::vector<float> scores_back(3);
  arrays.dataset("scores").read(0, std::span(scores_back));
  EXPECT_EQ(scores_back, scores);
  EXPECT_EQ(count_files(out), 3) << "no lock or temporary file stays";

  const ResultWriter resumed(out, IfResultsExist::kResume);
  EXPECT_EQ(resumed.recorded().size(), 2U);
  EXPECT_TRUE(resumed.recorded().contains(ResultKey::of(record_of("x/a b.txt"))));
  EXPECT_TRUE(resumed.recorded().contains(ResultKey::of(record_of("bad \xff bytes", "and \xc3 here"))));
  EXPECT_FALSE(resumed.recorded().contains(ResultKey::of(record_of("x/a b.txt", "", "score"))));
}

TEST(Results, RefusesToOverwrite) {
  const ScratchFolder folder;
  write_text(folder / "results.jsonl", "anything");
  expect_user_error([&] { ResultWriter writer(folder.path(), IfResultsExist::kError); },
                    {"results already", "results.jsonl"});
  EXPECT_EQ(read_text(folder / "results.jsonl"), "anything");
  EXPECT_EQ(count_files(folder.path()), 1);
}

TEST(Results, ResumeKeepsOldRecordsAndNamesDamagedLines) {
  const ScratchFolder folder;
  const std::string good = record_of("a").dump() + "\n" + record_of("b").dump() + "\n";
  write_text(folder / "results.jsonl", good);
  {
    ResultWriter writer(folder.path(), IfResultsExist::kResume);
    EXPECT_EQ(writer.recorded().size(), 2U);
    writer.write(record_of("c"));
    writer.finish();
  }
  EXPECT_EQ(read_text(folder / "results.jsonl"), good + record_of("c").dump() + "\n");
  const auto refuse = [&](const std::string& contents, std::string_view line, std::string_view what) {
    write_text(folder / "results.jsonl", contents);
    expect_user_error([&] { ResultWriter writer(folder.path(), IfResultsExist::kResume); }, {line, what});
    EXPECT_EQ(read_text(folder / "results.jsonl"), contents);
  };
  refuse(good + R"({"document": "c", "ta)", "results.jsonl:3", "no end");
  refuse(good + "{\"document\": \"c\", \"ta\n", "results.jsonl:3", "not a JSON record");
  refuse(record_of("a").dump() + "\n[1]\n" + record_of("b").dump() + "\n", "results.jsonl:2",
         "not a JSON record");
  refuse("{\"document\": \"c\"}\n", "results.jsonl:1", "'task'");
}

TEST(Results, ResumeRefusesRecordsOfOtherSettings) {
  const ScratchFolder folder;
  const ResultWriter::Settings one{{"a", "one"}};
  {
    ResultWriter writer(folder.path(), IfResultsExist::kError, one);
    writer.write(record_of("a"));
    writer.finish();
  }
  const std::string before = read_text(folder / "results.jsonl");
  const ResultWriter::Settings two{{"a", "two"}};
  expect_user_error([&] { ResultWriter writer(folder.path(), IfResultsExist::kResume, two); },
                    {"results.jsonl:1", "other settings"});
  EXPECT_EQ(read_text(folder / "results.jsonl"), before);
  for (const ResultWriter::Settings& fitting : {one, ResultWriter::Settings{{"b", "two"}}}) {
    const ResultWriter same(folder.path(), IfResultsExist::kResume, fitting);
    EXPECT_EQ(same.recorded().size(), 1U);
  }
}

TEST(Results, AFileThatChangedMeanwhileIsNotRewritten) {
  const ScratchFolder folder;
  const ResultWriter::Settings settings{{"a", "one"}};
  json lost = record_of("a");
  lost["settings"] = "one";
  lost["arrays"] = "arrays/gone.h5";
  write_text(folder / "results.jsonl", lost.dump() + "\n");
  ResultWriter writer(folder.path(), IfResultsExist::kResume, settings);
  const std::string changed = lost.dump() + "\n" + record_of("b").dump() + "\n";
  write_text(folder / "results.jsonl", changed);
  expect_user_error(
      [&] {
        writer.write(record_of("a"));
        writer.finish();
      },
      {"changed while the job ran", "results.jsonl"});
  EXPECT_EQ(read_text(folder / "results.jsonl"), changed);
}

// A job killed in the next document must not lose the records of this one.
TEST(Results, RecordsOfADocumentReachTheDiskTogether) {
  const ScratchFolder folder;
  ResultWriter writer(folder.path(), IfResultsExist::kError);
  const std::vector<json> first{record_of("a"), record_of("b"), record_of("c")};
  writer.write(first);
  EXPECT_EQ(records_in(folder.path()).size(), 3U);
  std::this_thread::sleep_for(std::chrono::seconds(2));  // ten times what the first rewriting took, by far
  const std::vector<json> second{record_of("d"), record_of("e")};
  writer.write(second);
  EXPECT_EQ(records_in(folder.path()).size(), 5U);
}

TEST(Results, ReplaceKeepsTheOldUntilTheFirstNewRecord) {
  const ScratchFolder folder;
  const std::vector<float> old_scores{1};
  const std::vector<float> new_scores{2};
  std::string old_arrays;
  {
    ResultWriter writer(folder.path(), IfResultsExist::kError);
    old_arrays = writer.write_arrays("a", {{}, old_scores, {}, 0});
    writer.write_arrays("b", {{}, old_scores, {}, 0});
    writer.write(record_of("a"));
    writer.finish();
  }
  const std::string old_records = read_text(folder / "results.jsonl");
  {
    ResultWriter writer(folder.path(), IfResultsExist::kReplace);
    EXPECT_TRUE(writer.recorded().empty());
  }
  {
    ResultWriter writer(folder.path(), IfResultsExist::kReplace);
    writer.finish();
  }
  EXPECT_EQ(read_text(folder / "results.jsonl"), old_records) << "a job without a result replaces nothing";
  EXPECT_EQ(count_files(folder.path()), 3);
  {
    ResultWriter writer(folder.path(), IfResultsExist::kReplace);
    writer.write_arrays("a", {{}, new_scores, {}, 0});
    EXPECT_EQ(read_text(folder / "results.previous.jsonl"), old_records);
    EXPECT_TRUE(std::filesystem::exists(folder / ("arrays.previous" + old_arrays.substr(6))));
    writer.write(record_of("new"));
    writer.finish();
  }
  EXPECT_EQ(records_in(folder.path()).at(0)["document"], "new");
  EXPECT_EQ(count_files(folder.path()), 2) << "the old results are gone";
  std::vector<float> value(1);
  Hdf5File::open(folder / old_arrays).dataset("scores").read(0, std::span(value));
  EXPECT_EQ(value, new_scores);
}

TEST(Results, OneJobAtATime) {
  const ScratchFolder folder;
  {
    ResultWriter first(folder.path(), IfResultsExist::kError);
    expect_user_error([&] { ResultWriter second(folder.path(), IfResultsExist::kError); },
                      {"another job", "process " + std::to_string(::getpid()), folder.path().string()});
    first.write(record_of("a"));
  }
  EXPECT_EQ(records_in(folder.path()).size(), 1U) << "an ending job writes what waits";
  ResultWriter third(folder.path(), IfResultsExist::kResume);
}

TEST(Results, RefusesUnusableFolders) {
  const ScratchFolder folder;
  write_text(folder / "file", "x");
  expect_user_error([&] { ResultWriter writer(folder / "file", IfResultsExist::kError); },
                    {"file of that name"});
  expect_user_error([&] { ResultWriter writer(folder / "file/below", IfResultsExist::kError); },
                    {"cannot be made", "below"});
  expect_user_error([&] { ResultWriter writer("/proc/longhalo", IfResultsExist::kError); },
                    {"/proc/longhalo"});
  if (::geteuid() != 0) {
    std::filesystem::create_directory(folder / "locked");
    std::filesystem::permissions(folder / "locked", std::filesystem::perms(0555));
    expect_user_error([&] { ResultWriter writer(folder / "locked", IfResultsExist::kError); },
                      {"Permission denied"});
  }
}

TEST(Results, ReadOnlyDiskIsRefused) {
  const TinyDisk disk;
  if (!disk.reason().empty()) GTEST_SKIP() << disk.reason();
  ASSERT_EQ(::mount(nullptr, disk.path().c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr), 0);
  expect_user_error([&] { ResultWriter writer(disk.path(), IfResultsExist::kError); },
                    {"Read-only", disk.path().string()});
  expect_user_error([&] { ResultWriter writer(disk / "new", IfResultsExist::kError); }, {"Read-only"});
}

TEST(Results, FullDiskKeepsWholeRecords) {
  const TinyDisk disk;
  if (!disk.reason().empty()) GTEST_SKIP() << disk.reason();
  int written = 0;
  {
    ResultWriter writer(disk.path(), IfResultsExist::kError);
    const std::vector<float> large(1 << 19);
    expect_user_error(
        [&] {
          writer.write_arrays("a", {{}, large, {}, 0});
        },
        {"2097152 bytes needed", "bytes free"});
    expect_user_error(
        [&] {
          for (; written < 1000; ++written) {
            json record = record_of(std::to_string(written));
            record["answer"] = std::string(20000, 'x');
            writer.write(record);
            writer.finish();  // at once, however slow the disk is: how many fit is then no matter of time
          }
        },
        {"No space left", "bytes needed", "bytes free", "results.jsonl"});
  }
  const std::vector<json> records = records_in(disk.path());
  // The new file stands beside the old one: about half of the disk can be filled.
  EXPECT_GE(records.size(), 10U) << "of " << written;
  EXPECT_LE(records.size(), static_cast<size_t>(written));
  for (size_t i = 0; i < records.size(); ++i)
    EXPECT_EQ(records[i]["document"], std::to_string(i));
}

TEST(Results, SizeLimitKeepsWholeRecords) {
  const ScratchFolder folder;
  {
    ResultWriter writer(folder.path(), IfResultsExist::kError);
    const FileSizeLimit limit(100000);
    expect_user_error(
        [&] {
          for (int i = 0; i < 100; ++i) {
            json record = record_of(std::to_string(i));
            record["answer"] = std::string(20000, 'x');
            writer.write(record);
          }
          writer.finish();
        },
        {"too large", "bytes needed", "ulimit -f"});
  }
  for (const json& record : records_in(folder.path()))
    EXPECT_EQ(record["answer"].get<std::string>().size(), 20000U);
  EXPECT_EQ(count_files(folder.path()), std::filesystem::exists(folder / "results.jsonl") ? 1 : 0);
}

TEST(Results, NoticesAnotherWriter) {
  const ScratchFolder folder;
  ResultWriter writer(folder.path(), IfResultsExist::kError);
  writer.write(record_of("a"));
  std::ofstream(folder / "results.jsonl", std::ios::app) << "intruder\n";
  expect_user_error(
      [&] {
        writer.write(record_of("b"));
        writer.finish();
      },
      {"changed while the job ran"});
}

// The job's own loop: arrays, then their record, until killed. Every record's number is its document.
[[noreturn]] void run_job(const std::filesystem::path& out) {
  try {
    ResultWriter writer(out, IfResultsExist::kResume);
    auto number = static_cast<int32_t>(writer.recorded().size());
    for (;; ++number) {
      const std::string name = std::to_string(number);
      const std::vector<int32_t> tokens(100, number);
      json record = record_of(name);
      record["arrays"] = writer.write_arrays(name, {tokens, {}, {}, 0});
      record["answer"] = std::string(static_cast<size_t>(number % 50) * 100, 'x');
      writer.write(record);
    }
  } catch (const std::exception& error) {
    std::fputs(error.what(), stderr);
    ::_exit(3);
  }
}

TEST(Results, KilledJobsLeaveWholeRecords) {
  const ScratchFolder folder;
  std::mt19937 random(11);
  size_t before = 0;
  // At least 40 kills at random moments; on a slow machine more and later ones, until enough was written to
  // judge.
  constexpr int kKills = 40;
  constexpr size_t kEnoughRecords = 20;
  for (int round = 0; round < kKills || before < kEnoughRecords; ++round) {
    const int longest_microseconds = 60000 * (1 + round / kKills);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) run_job(folder.path());
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::uniform_int_distribution<int>(1000, longest_microseconds)(random)));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the job ended by itself, with " << status;
    const std::vector<json> records = records_in(folder.path());
    ASSERT_GE(records.size(), before) << "records were lost";
    before = records.size();
    for (size_t i = 0; i < records.size(); ++i) {
      ASSERT_EQ(records[i]["document"], std::to_string(i));
      ASSERT_EQ(records[i]["answer"].get<std::string>().size(), i % 50 * 100);
    }
  }
  // Each record's arrays are there and whole.
  for (const json& record : records_in(folder.path())) {
    std::vector<int32_t> tokens(100);
    Hdf5File::open(folder / record["arrays"].get<std::string>()).dataset("tokens").read(0, std::span(tokens));
    ASSERT_EQ(tokens, std::vector<int32_t>(100, std::stoi(record["document"].get<std::string>())));
  }
  { const ResultWriter writer(folder.path(), IfResultsExist::kResume); }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
    EXPECT_EQ(entry.path().string().find(".tmp."), std::string::npos) << entry.path() << " was left behind";
  }
}

}  // namespace
}  // namespace longhalo

// Arrays of earlier results: those that are gone or damaged are made again, and a folder that takes none is
// said before the work.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <vector>

#include "results_fixture.hpp"
#include "scratch.hpp"
#include "storage/results.hpp"

namespace longhalo {
namespace {

using namespace testing;
using nlohmann::json;

// With the arrays of a record gone it is made again, in its own place alone.
TEST(ResultArrays, RecordsWithoutTheirArraysAreReplaced) {
  const ScratchFolder folder;
  const ResultWriter::Settings settings{{"a", "one"}, {"b", "one"}};
  const std::vector<int32_t> tokens{5, 6};
  const std::vector<float> scores{1, 2};
  const auto with_arrays = [&](ResultWriter& writer, const std::string& name, int number) {
    json record = record_of(name, "", "score");
    record["arrays"] = writer.write_arrays(name, {tokens, scores, {}, 0});
    record["number"] = number;
    return record;
  };
  std::vector<json> made;
  {
    ResultWriter writer(folder.path(), IfResultsExist::kError, settings);
    for (const char* name : {"a", "b", "of another job"})
      made.push_back(with_arrays(writer, name, 1));
    made.push_back(record_of("a", "why?", "generate"));
    writer.write(made);
    writer.finish();
  }
  std::filesystem::remove_all(folder / "arrays");
  const std::string before = read_text(folder / "results.jsonl");
  ResultWriter writer(folder.path(), IfResultsExist::kResume, settings);
  EXPECT_EQ(writer.lost(), (std::set<ResultKey>{{"a", "", "score"}, {"b", "", "score"}}));
  EXPECT_EQ(writer.recorded(),
            (std::set<ResultKey>{{"a", "why?", "generate"}, {"of another job", "", "score"}}));
  EXPECT_EQ(read_text(folder / "results.jsonl"), before);
  writer.write(with_arrays(writer, "b", 2));
  writer.finish();
  std::vector<json> left = records_in(folder.path());
  ASSERT_EQ(left.size(), 4U);
  EXPECT_EQ(left[0]["document"], "a");
  EXPECT_EQ(left[1]["document"], "of another job");
  EXPECT_EQ(left[2]["task"], "generate");
  EXPECT_EQ(left[3]["document"], "b");
  EXPECT_EQ(left[3]["number"], 2);
  EXPECT_TRUE(std::filesystem::exists(folder / left[3]["arrays"].get<std::string>()));
  writer.write(with_arrays(writer, "a", 3));
  writer.finish();
  left = records_in(folder.path());
  ASSERT_EQ(left.size(), 4U);
  EXPECT_EQ(left[3]["number"], 3);
  EXPECT_TRUE(writer.lost().empty());
}

TEST(ResultArrays, ArraysThatCannotBeLookedAtAreNotTakenForGone) {
  const ScratchFolder folder;
  json record = record_of("a", "", "score");
  record["settings"] = "one";
  record["arrays"] = "arrays/a.h5";
  write_text(folder / "results.jsonl", record.dump() + "\n");
  std::filesystem::create_directory_symlink("arrays", folder / "arrays");  // leads nowhere but to itself
  expect_user_error(
      [&] {
        ResultWriter(folder.path(), IfResultsExist::kResume, {{"a", "one"}});
      },
      {"arrays/a.h5"});
}

TEST(ResultArrays, WhatIsNoFileInPlaceOfArraysIsSaidBeforeTheWork) {
  for (const bool is_pipe : {false, true}) {
    const ScratchFolder folder;
    json record = record_of("a", "", "score");
    record["settings"] = "one";
    record["arrays"] = "arrays/a.h5";
    write_text(folder / "results.jsonl", record.dump() + "\n");
    const std::filesystem::path place = folder / "arrays" / "a.h5";
    std::filesystem::create_directories(is_pipe ? place.parent_path() : place);
    if (is_pipe) {
      ASSERT_EQ(::mkfifo(place.c_str(), 0600), 0);
    }
    expect_user_error(
        [&] {
          ResultWriter(folder.path(), IfResultsExist::kResume, {{"a", "one"}});
        },
        {"stands where the arrays of a document go", place.string()});
    EXPECT_TRUE(std::filesystem::exists(place));
  }
}

// Emptied, cut, of another program, of another length or without what the task made: none counts as done.
TEST(ResultArrays, RecordsWhoseArraysAreDamagedAreReplaced) {
  const ScratchFolder folder;
  const ResultWriter::Settings settings{{"a", "one"}};
  const std::vector<int32_t> tokens(1000, 5);
  const std::vector<float> scores(1000, 1.0F);
  const auto write = [&](const std::vector<float>& values) {
    ResultWriter writer(folder.path(), IfResultsExist::kReplace, settings);
    json record = record_of("a", "", "score");
    record["document_tokens"] = scores.size();
    record["arrays"] = writer.write_arrays("a", {tokens, values, {}, 0});
    json embed = record_of("a", "", "embed");
    embed.update({{"chunks", 1}, {"embedding_size", 1000}, {"arrays", record["arrays"]}});
    writer.write(std::vector<json>{record, embed});
    writer.finish();
    return folder / record["arrays"].get<std::string>();
  };
  const auto lost = [&] { return ResultWriter(folder.path(), IfResultsExist::kResume, settings).lost(); };
  const ResultKey score{"a", "", "score"}, embed{"a", "", "embed"};
  const std::filesystem::path file = write(scores);
  EXPECT_EQ(lost(), std::set<ResultKey>{embed}) << "this file has scores alone";
  const std::string whole = read_text(file);
  for (const std::string& damaged : {std::string(), whole.substr(0, whole.size() / 2), std::string("text"),
                                     std::string(whole.size(), '\0')}) {
    write_text(file, damaged);
    EXPECT_EQ(lost(), (std::set<ResultKey>{score, embed})) << damaged.size() << " bytes";
  }
  write_text(file, whole);
  EXPECT_EQ(lost(), std::set<ResultKey>{embed});
  write(std::vector<float>(999, 1.0F));
  EXPECT_EQ(lost(), (std::set<ResultKey>{score, embed})) << "a score is missing";
}

// As long as its own, but of another document, of another text of this name, or without the document.
TEST(ResultArrays, RecordsWhoseArraysAreOfAnotherDocumentAreReplaced) {
  namespace fs = std::filesystem;
  const ScratchFolder folder, other_text, earlier_version;
  const std::vector<int32_t> tokens{5, 6, 7};
  const std::vector<float> scores{-1, -2, -3};
  const ResultWriter::Settings settings{{"a", "one"}, {"b", "one"}};
  const auto write = [&](const fs::path& out, const ResultWriter::Settings& of, const char* document,
                         std::span<const int32_t> its_tokens) {
    ResultWriter writer(out, IfResultsExist::kResume, of);
    json record = record_of(document, "", "score");
    record["document_tokens"] = scores.size();
    record["arrays"] = writer.write_arrays(document, {its_tokens, scores, {}, 0});
    writer.write(record);
    writer.finish();
    return record["arrays"].get<std::string>();
  };
  const fs::path a = folder / write(folder.path(), settings, "a", tokens);
  const fs::path b = folder / write(folder.path(), settings, "b", tokens);
  const std::string whole_a = read_text(a), whole_b = read_text(b);
  const auto lost = [&] { return ResultWriter(folder.path(), IfResultsExist::kResume, settings).lost(); };
  const ResultKey score_a{"a", "", "score"}, score_b{"b", "", "score"};
  EXPECT_EQ(lost(), std::set<ResultKey>());
  write_text(a, whole_b);
  EXPECT_EQ(lost(), std::set<ResultKey>{score_a});
  write_text(b, whole_a);
  EXPECT_EQ(lost(), (std::set<ResultKey>{score_a, score_b})) << "exchanged";
  write_text(b, whole_b);

  const auto take = [&](const ScratchFolder& from, const ResultWriter::Settings& of, auto its_tokens) {
    write_text(a, read_text(from / write(from.path(), of, "a", its_tokens)));
  };
  take(other_text, {{"a", "two"}}, std::span<const int32_t>(tokens));
  EXPECT_EQ(lost(), std::set<ResultKey>{score_a}) << "another text";
  take(earlier_version, {}, std::span<const int32_t>(tokens));
  EXPECT_EQ(lost(), std::set<ResultKey>()) << "without settings, as earlier versions wrote them";
  for (const size_t count : {0, 2}) {
    const ScratchFolder short_one;
    take(short_one, {{"a", "one"}}, std::span<const int32_t>(tokens).first(count));
    EXPECT_EQ(lost(), std::set<ResultKey>{score_a}) << count << " tokens";
  }
}

// Folders in place of files: nothing of other documents, or of tasks that are not this job's, stands in its
// way.
TEST(ResultArrays, WhatThisJobDoesNotMakeIsNotLookedAt) {
  const ScratchFolder folder;
  std::string records;
  for (const auto& [document, task] :
       std::vector<std::pair<std::string, std::string>>{{"a", "embed"}, {"b", "score"}}) {
    json record = record_of(document, "", task);
    record.update({{"settings", "one"}, {"arrays", "arrays/" + task + ".h5"}});
    records += record.dump() + "\n";
    std::filesystem::create_directories(folder / "arrays" / (task + ".h5"));
  }
  write_text(folder / "results.jsonl", records);
  const auto resume = [&](const ResultWriter::Settings& settings, const ResultWriter::Tasks& tasks) {
    const ResultWriter writer(folder.path(), IfResultsExist::kResume, settings, tasks);
    writer.require_places({"a"});
    EXPECT_EQ(writer.recorded(), (std::set<ResultKey>{{"a", "", "embed"}, {"b", "", "score"}}));
    EXPECT_TRUE(writer.lost().empty());
  };
  resume({{"a", "one"}}, {"score", "generate"});
  resume({{"a", "one"}, {"b", "one"}}, {"generate"});
  expect_user_error([&] { resume({{"a", "one"}}, {"embed"}); }, {"a folder, device or pipe", "embed.h5"});
  expect_user_error([&] { resume({{"b", "one"}}, {"score"}); }, {"a folder, device or pipe", "score.h5"});
}

int children = 0;
bool first_child_dies = false;

// A child for each would take minutes where there are many thousands of records.
TEST(ResultArrays, ArraysOfManyRecordsAreReadByOneChildAndBySeveralOnlyWhereItDies) {
  const ScratchFolder folder;
  constexpr int kDocuments = 20;
  ResultWriter::Settings settings;
  for (int i = 0; i < kDocuments; ++i)
    settings[std::to_string(i)] = "one";
  std::filesystem::path damaged;
  {
    ResultWriter writer(folder.path(), IfResultsExist::kError, settings);
    const std::vector<int32_t> tokens(10, 5);
    const std::vector<float> scores(10, 1.0F);
    for (int i = 0; i < kDocuments; ++i) {
      json record = record_of(std::to_string(i), "", "score");
      record["document_tokens"] = scores.size();
      record["arrays"] = writer.write_arrays(std::to_string(i), {tokens, scores, {}, 0});
      damaged = folder / record["arrays"].get<std::string>();
      writer.write(record);
    }
    writer.finish();
  }
  write_text(damaged, "text");
  const std::set<ResultKey> lost{{std::to_string(kDocuments - 1), "", "score"}};
  ::pthread_atfork([] { ++children; }, nullptr,
                   [] {
                     if (first_child_dies && children == 1) ::_exit(1);
                   });
  for (const bool dies : {false, true}) {
    children = 0, first_child_dies = dies;
    const ResultWriter writer(folder.path(), IfResultsExist::kResume, settings);
    EXPECT_EQ(writer.lost(), lost);
    EXPECT_EQ(writer.recorded().size(), static_cast<size_t>(kDocuments - 1));
    EXPECT_EQ(children, dies ? 1 + kDocuments : 1);
  }
  first_child_dies = false;
}

TEST(ResultArrays, AnArraysFolderThatTakesNoFileIsSaidBeforeTheWork) {
  namespace fs = std::filesystem;
  const ScratchFolder folder;
  fs::create_directory(folder / "arrays");
  fs::permissions(folder / "arrays", fs::perms(0555));
  fs::permissions(folder.path(), fs::perms(0777));
  {
    const AsNobody nobody;
    for (const IfResultsExist mode : {IfResultsExist::kError, IfResultsExist::kResume}) {
      const ResultWriter writer(folder.path(), mode);
      expect_user_error([&] { writer.require_places({"a"}); },
                        {"arrays", "takes no file: Permission denied", "give this user the right to write"});
    }
    const ResultWriter replacing(folder.path(), IfResultsExist::kReplace);
    replacing.require_places({"a"});  // what is there makes way
  }
  fs::permissions(folder / "arrays", fs::perms::owner_all);
}

// Another user's file in a folder where everybody may write to what is theirs alone.
TEST(ResultArrays, AFileThatCannotBeReplacedIsSaidBeforeTheWork) {
  namespace fs = std::filesystem;
  if (::geteuid() != 0) GTEST_SKIP() << "files of two users need root";
  const ScratchFolder folder;
  const auto sticky = fs::perms::all | fs::perms::sticky_bit;
  std::string arrays;
  {
    ResultWriter writer(folder.path(), IfResultsExist::kError);
    arrays = writer.write_arrays("a", {std::vector<int32_t>{1}, {}, {}, 0});
    writer.write(record_of("a"));
    writer.finish();
  }
  fs::permissions(folder.path(), sticky);
  fs::permissions(folder / "arrays", sticky);
  const auto refused = [&](IfResultsExist mode, const std::string& name) {
    const AsNobody nobody;
    const ResultWriter writer(folder.path(), mode);
    expect_user_error(
        [&] {
          writer.require_places({"b", "a"});
        },
        {"cannot be replaced: Operation not permitted", (folder / name).string()});
  };
  refused(IfResultsExist::kResume, "results.jsonl");
  refused(IfResultsExist::kReplace, "results.jsonl");
  ASSERT_EQ(::chown((folder / "results.jsonl").c_str(), AsNobody::kUser, AsNobody::kUser), 0);
  refused(IfResultsExist::kResume, arrays);
  refused(IfResultsExist::kReplace, "arrays");
  ASSERT_EQ(::chown((folder / "arrays").c_str(), AsNobody::kUser, AsNobody::kUser), 0);
  fs::create_directories(folder / "arrays.previous" / "deep");
  refused(IfResultsExist::kReplace, "arrays.previous");
  ASSERT_EQ(::chown((folder / "arrays.previous").c_str(), AsNobody::kUser, AsNobody::kUser), 0);
  fs::permissions(folder / "arrays.previous", fs::perms::owner_read | fs::perms::owner_exec);
  {
    const AsNobody nobody;
    expect_user_error([&] { ResultWriter(folder.path(), IfResultsExist::kReplace).require_places({}); },
                      {"cannot be replaced: Permission denied", "arrays.previous/deep"});
    const ResultWriter resuming(folder.path(), IfResultsExist::kResume);
    resuming.require_places({"b"});
    resuming.require_places({});
  }
  EXPECT_EQ(count_files(folder.path()), 2) << "nothing was taken away";
}

TEST(ResultArrays, AFolderInPlaceOfNewArraysIsSaidBeforeTheWork) {
  const ScratchFolder folder;
  ResultWriter writer(folder.path(), IfResultsExist::kError);
  const std::filesystem::path place = folder / writer.write_arrays("a", {std::vector<int32_t>{1}, {}, {}, 0});
  std::filesystem::remove(place);
  std::filesystem::create_directory(place);
  expect_user_error([&] { writer.require_places({"b", "a"}); }, {"a folder, device or pipe", place.string()});
  EXPECT_TRUE(std::filesystem::exists(place));
  writer.require_places({"b"});
}

TEST(ResultArrays, WhatIsInPlaceOfTheArraysFolderIsSaidBeforeTheWork) {
  const ScratchFolder folder;
  const ResultWriter writer(folder.path(), IfResultsExist::kResume);
  writer.require_places({"a"});
  EXPECT_FALSE(std::filesystem::exists(folder / "arrays")) << "it is made with the first arrays";
  write_text(folder / "arrays", "a file");
  expect_user_error([&] { writer.require_places({"a"}); }, {"a file of that name", "move away"});
  std::filesystem::remove(folder / "arrays");
  std::filesystem::create_symlink("/proc/self", folder / "arrays");
  expect_user_error([&] { writer.require_places({"a"}); }, {"takes no file: Invalid cross-device link"});
  std::filesystem::remove(folder / "arrays");
  std::filesystem::create_directory(folder / "arrays");
  writer.require_places({"a"});
  EXPECT_EQ(count_files(folder.path()), 1) << "the lock alone";
}

}  // namespace
}  // namespace longhalo

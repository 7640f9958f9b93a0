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
  const std::vector<float> scores{1, 2};
  const auto with_arrays = [&](ResultWriter& writer, const std::string& name, int number) {
    json record = record_of(name, "", "score");
    record["arrays"] = writer.write_arrays(name, {{}, scores, {}, 0});
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
  json record = record_of("a");
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
    json record = record_of("a");
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
        {"stands where an earlier job wrote arrays", place.string()});
    EXPECT_TRUE(std::filesystem::exists(place));
  }
}

// Emptied, cut, of another program, of another length or without what the task made: none counts as done.
TEST(ResultArrays, RecordsWhoseArraysAreDamagedAreReplaced) {
  const ScratchFolder folder;
  const ResultWriter::Settings settings{{"a", "one"}};
  const std::vector<float> scores(1000, 1.0F);
  const auto write = [&](const std::vector<float>& values) {
    ResultWriter writer(folder.path(), IfResultsExist::kReplace, settings);
    json record = record_of("a", "", "score");
    record["document_tokens"] = scores.size();
    record["arrays"] = writer.write_arrays("a", {{}, values, {}, 0});
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
    const std::vector<float> scores(10, 1.0F);
    for (int i = 0; i < kDocuments; ++i) {
      json record = record_of(std::to_string(i), "", "score");
      record["document_tokens"] = scores.size();
      record["arrays"] = writer.write_arrays(std::to_string(i), {{}, scores, {}, 0});
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
      expect_user_error([&] { writer.require_arrays_folder(); },
                        {"arrays", "takes no file: Permission denied", "give this user the right to write"});
    }
    const ResultWriter replacing(folder.path(), IfResultsExist::kReplace);
    replacing.require_arrays_folder();  // what is there makes way
  }
  fs::permissions(folder / "arrays", fs::perms::owner_all);
}

TEST(ResultArrays, WhatIsInPlaceOfTheArraysFolderIsSaidBeforeTheWork) {
  const ScratchFolder folder;
  const ResultWriter writer(folder.path(), IfResultsExist::kResume);
  writer.require_arrays_folder();
  EXPECT_FALSE(std::filesystem::exists(folder / "arrays")) << "it is made with the first arrays";
  write_text(folder / "arrays", "a file");
  expect_user_error([&] { writer.require_arrays_folder(); }, {"a file of that name", "move away"});
  std::filesystem::remove(folder / "arrays");
  std::filesystem::create_symlink("/proc/self", folder / "arrays");
  expect_user_error([&] { writer.require_arrays_folder(); }, {"takes no file: Invalid cross-device link"});
  std::filesystem::remove(folder / "arrays");
  std::filesystem::create_directory(folder / "arrays");
  writer.require_arrays_folder();
  EXPECT_EQ(count_files(folder.path()), 1) << "the lock alone";
}

}  // namespace
}  // namespace longhalo

// Every stored input of the fuzzers, and what once broke a reader, through the same doors; needs no clang.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/targets.hpp"

namespace longhalo::fuzz {
namespace {

namespace fs = std::filesystem;

std::string contents_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  if (!fs::is_directory(folder)) return files;
  for (const auto& entry : fs::directory_iterator(folder))
    files.push_back(entry.path());
  return files;
}

class Corpus : public ::testing::TestWithParam<Target> {
 protected:
  static Outcome outcome_of(const fs::path& file) {
    const std::string contents = contents_of(file);
    return run(GetParam(), std::as_bytes(std::span(contents.data(), contents.size())));
  }
  static fs::path folder(const char* kind) {
    return fs::path(LONGHALO_SOURCE_DIR) / "tests" / "fuzz" / kind / std::string(GetParam().name);
  }
};

// make_corpus.py writes sound files, and names those that are to be refused bad_*.
TEST_P(Corpus, SoundFilesAreTakenAndOthersRefused) {
  const std::vector<fs::path> files = files_in(folder("corpus"));
  ASSERT_FALSE(files.empty()) << folder("corpus");
  int taken = 0;
  for (const fs::path& file : files) {
    const bool is_bad = file.filename().string().starts_with("bad_");
    EXPECT_EQ(outcome_of(file), is_bad ? Outcome::kRefused : Outcome::kTaken) << file;
    taken += is_bad ? 0 : 1;
  }
  EXPECT_GT(taken, 0) << "without a sound file nothing shows that the reader was reached";
}

// What once made a reader crash, hang or throw something else than a UserError.
TEST_P(Corpus, WhatBrokeAReaderIsRefusedOrTaken) {
  for (const fs::path& file : files_in(folder("crashes"))) {
    SCOPED_TRACE(file.string());
    EXPECT_NO_THROW(outcome_of(file));
  }
}

// A byte changed, cut off or added anywhere: the cheap part of what the fuzzers do, on every machine.
TEST_P(Corpus, DamageEverywhere) {
  for (const fs::path& file : files_in(folder("corpus"))) {
    const std::string sound = contents_of(file);
    const size_t step = sound.size() / 60 + 1;
    for (size_t at = 0; at < sound.size(); at += step) {
      std::string changed = sound;
      changed[at] = static_cast<char>(changed[at] ^ (1 << at % 8));
      for (const std::string& bytes : {changed, sound.substr(0, at), sound.substr(at)}) {
        SCOPED_TRACE(file.string() + " at byte " + std::to_string(at));
        EXPECT_NO_THROW(run(GetParam(), std::as_bytes(std::span(bytes.data(), bytes.size()))));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Readers, Corpus, ::testing::ValuesIn(all_targets().begin(), all_targets().end()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace longhalo::fuzz

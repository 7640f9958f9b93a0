// What the `tokenizers` and `sentencepiece` packages make of the corpus: made anew for each run of the test
// by tokenizer_reference.py, so it cannot be stale.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace longhalo::test {

struct Reference {
  std::filesystem::path folder;
  std::string missing;             ///< why there is no reference; empty if there is one
  std::vector<std::string> texts;  ///< the corpus
  std::vector<std::string> names;  ///< sub-folders with a model each
};

struct TextReference {
  size_t text;  ///< index into Reference::texts
  std::vector<int32_t> ids_as_text;
  std::vector<int32_t> ids_parsed;
  std::string decoded;  ///< of ids_parsed
};

/// Runs the script on the first call, into a folder of the build.
const Reference& reference();

std::vector<TextReference> read_reference(const std::string& name);

/// Log-probability of every piece of a unigram model; empty for another.
std::vector<float> read_scores(const std::string& name);

}  // namespace longhalo::test

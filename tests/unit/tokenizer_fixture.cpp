#include "tokenizer_fixture.hpp"

#include <fstream>

#include "core/text.hpp"
#include "tokenizer/byte_alphabet.hpp"
#include "tokenizer/utf8.hpp"

namespace longhalo::test {

using nlohmann::json;

ScratchFolder::ScratchFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "longhalo_tokenizer_XXXXXX").string();
  check(mkdtemp(pattern.data()) != nullptr, "a temporary folder can be made");
  path_ = pattern;
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void ScratchFolder::write(const std::string& name, std::string_view content) const {
  std::ofstream out(path_ / name, std::ios::binary);
  out << content;
  check(static_cast<bool>(out), "a test file can be written");
}

json tiny_description() {
  json vocabulary = json::object();
  for (size_t byte = 0; byte < 256; ++byte) {
    std::string spelling;
    append_utf8(spelling, byte_alphabet()[byte]);
    vocabulary[spelling] = byte;
  }
  const json merges =
      json::parse(R"([["a", "a"], ["aa", "aa"], ["Ġ", "Ġ"], ["ĠĠ", "ĠĠ"], ["a", "b"], ["c", "ab"]])");
  int32_t id = kA2;
  for (const json& merge : merges)
    vocabulary[merge[0].get<std::string>() + merge[1].get<std::string>()] = id++;
  const auto added = [](int32_t token, const char* content, bool special) {
    return json{{"id", token},     {"content", content},  {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", special}};
  };
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", json::array({added(kSpecial, "<|s|>", true), added(kAdded, "<add>", false)})},
          {"normalizer", nullptr},
          {"pre_tokenizer", pre_tokenizer("gpt2")},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", merges}}}};
}

json pre_tokenizer(std::string_view name) {
  const auto byte_level = [](bool use_regex) {
    return json{
        {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
  };
  if (name == "gpt2") return byte_level(true);
  if (name == "smollm2") {
    return {{"type", "Sequence"},
            {"pretokenizers", {{{"type", "Digits"}, {"individual_digits", true}}, byte_level(true)}}};
  }
  const std::string digits = name == "llama3" ? R"(\p{N}{1,3})" : R"(\p{N})";
  const std::string expression = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|)" + digits +
                                 R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  const json split = {
      {"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", "Isolated"}, {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", {split, byte_level(false)}}};
}

std::unique_ptr<Tokenizer> load_description(const json& description) {
  const ScratchFolder folder;
  folder.write("tokenizer.json", description.dump());
  return Tokenizer::load(folder.path());
}

}  // namespace longhalo::test

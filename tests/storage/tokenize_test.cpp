// `longhalo tokenize` as a whole, with a byte-level tokenizer made here: text -> token file -> the same text.
#include "app/tokenize.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "core/text.hpp"
#include "dataset/token_file.hpp"
#include "scratch.hpp"
#include "storage/sha256.hpp"

namespace longhalo {
namespace {

using namespace testing;
using nlohmann::json;

std::string utf8(uint32_t code) {
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
}

// GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for the code points from 256 on.
void write_byte_level_tokenizer(const std::filesystem::path& directory) {
  std::filesystem::create_directories(directory);
  json vocabulary = json::object();
  uint32_t next = 256;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
    vocabulary[utf8(printable ? byte : next++)] = byte;
  }
  vocabulary["he"] = 256;
  vocabulary["the"] = 257;
  const json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  const json tokenizer = {{"version", "1.0"},
                          {"added_tokens", json::array()},
                          {"normalizer", nullptr},
                          {"pre_tokenizer", byte_level},
                          {"post_processor", nullptr},
                          {"decoder", byte_level},
                          {"model",
                           {{"type", "BPE"},
                            {"dropout", nullptr},
                            {"unk_token", nullptr},
                            {"vocab", vocabulary},
                            {"merges", {"h e", "t he"}}}}};
  write_text(directory / "tokenizer.json", tokenizer.dump());
}

class TokenizeTest : public ::testing::Test {
 protected:
  TokenizeTest() {
    write_byte_level_tokenizer(folder_ / "model");
    write_text(folder_ / "a.txt", "the theme\r\n \xe2\x98\x83\xff end");
    std::filesystem::create_directory(folder_ / "sub");
    write_text(folder_ / "sub/a.txt", "other");
    options_.model = (folder_ / "model").string();
    options_.output = (folder_ / "tokens.h5").string();
    options_.inputs = {(folder_ / "a.txt").string(), (folder_ / "sub/a.txt").string()};
    options_.progress.style = ProgressStyle::kOff;
  }
  TokenizeOptions decoding() const {
    TokenizeOptions options = options_;
    options.inputs.clear();
    options.decode = options_.output;
    options.output = (folder_ / "texts").string();
    return options;
  }
  ScratchFolder folder_;
  TokenizeOptions options_;
};

TEST_F(TokenizeTest, ThereAndBack) {
  run_tokenize(options_);
  const TokenFile tokens(options_.output);
  EXPECT_EQ(tokens.documents(), 2);
  EXPECT_EQ(tokens.document_name(1), options_.inputs[1]);
  EXPECT_EQ(tokens.info().tokenizer, "model/tokenizer.json");
  EXPECT_EQ(tokens.info().tokenizer_sha256, sha256_of_file(folder_ / "model/tokenizer.json"));
  EXPECT_EQ(tokens.info().vocabulary_size, 258);
  EXPECT_EQ(tokens.read(0).front(), 257) << "'the' is one token";
  run_tokenize(decoding());
  EXPECT_EQ(read_text(folder_ / "texts/a.txt"), read_text(folder_ / "a.txt"));
  EXPECT_EQ(read_text(folder_ / "texts/1_a.txt"), "other") << "equal names are kept apart";
  EXPECT_EQ(count_files(folder_ / "texts"), 2);
}

TEST_F(TokenizeTest, ReplacesOnlyWhenAsked) {
  write_text(options_.output, "old");
  expect_user_error([&] { run_tokenize(options_); }, {"exists already", options_.output});
  EXPECT_EQ(read_text(options_.output), "old");
  options_.if_exists = IfOutputExists::kReplace;
  run_tokenize(options_);
  TokenizeOptions back = decoding();
  std::filesystem::create_directory(back.output);
  write_text(folder_ / "texts/1_a.txt", "old");
  back.if_exists = IfOutputExists::kError;
  expect_user_error([&] { run_tokenize(back); }, {"exists already", "1_a.txt"});
  EXPECT_EQ(count_files(folder_ / "texts"), 1);
  back.if_exists = IfOutputExists::kReplace;
  run_tokenize(back);
  EXPECT_EQ(read_text(folder_ / "texts/1_a.txt"), "other");
}

TEST_F(TokenizeTest, NeverReplacesWhatItReads) {
  namespace fs = std::filesystem;
  write_text(folder_ / "model/model.safetensors", "weights");
  fs::rename(folder_ / "model/model.safetensors", folder_ / "blob");
  fs::create_symlink("../blob", folder_ / "model/model.safetensors");
  fs::create_symlink("a.txt", folder_ / "link.txt");
  fs::create_hard_link(folder_ / "a.txt", folder_ / "other_name.txt");
  options_.if_exists = IfOutputExists::kReplace;
  const int files = count_files(folder_.path());
  const std::string text_before = read_text(folder_ / "a.txt");
  const std::string tokenizer_before = read_text(folder_ / "model/tokenizer.json");
  for (const char* output : {"a.txt", "sub/../a.txt", "link.txt", "other_name.txt", "model/tokenizer.json",
                             "model/model.safetensors", "blob", "model/config.json"}) {
    options_.output = (folder_ / output).string();
    expect_user_error([&] { run_tokenize(options_); }, {"what is read", options_.output, "--output"});
  }
  EXPECT_EQ(read_text(folder_ / "a.txt"), text_before);
  EXPECT_EQ(read_text(folder_ / "model/tokenizer.json"), tokenizer_before);
  EXPECT_EQ(read_text(folder_ / "blob"), "weights");
  EXPECT_FALSE(fs::exists(folder_ / "model/config.json"));
  EXPECT_EQ(count_files(folder_.path()), files);
}

TEST_F(TokenizeTest, DecodingDoesNotReplaceWhatItReads) {
  write_text(folder_ / "sub/tokens.h5", "a text of this name");
  write_text(folder_ / "sub/tokenizer.json", "another");
  options_.inputs = {(folder_ / "a.txt").string(), (folder_ / "sub/tokens.h5").string()};
  run_tokenize(options_);
  TokenizeOptions back = decoding();
  back.if_exists = IfOutputExists::kReplace;
  back.output = folder_.path().string();
  const std::string before = read_text(folder_ / "tokens.h5");
  write_text(folder_ / "a.txt", "newer");
  expect_user_error([&] { run_tokenize(back); }, {"what is read", "tokens.h5", "--output"});
  EXPECT_EQ(read_text(folder_ / "tokens.h5"), before);
  EXPECT_EQ(read_text(folder_ / "a.txt"), "newer") << "nothing is written before all is looked at";
  options_.inputs = {(folder_ / "sub/tokenizer.json").string()};
  options_.if_exists = IfOutputExists::kReplace;
  run_tokenize(options_);
  back.output = (folder_ / "model").string();
  expect_user_error([&] { run_tokenize(back); }, {"what is read", "model/tokenizer.json"});
}

TEST_F(TokenizeTest, WritesThroughLinks) {
  namespace fs = std::filesystem;
  const std::string file = (folder_ / "real.h5").string();
  fs::create_symlink("real.h5", options_.output);
  run_tokenize(options_);
  EXPECT_EQ(TokenFile(file).documents(), 2) << "a link to what is not there yet";
  expect_user_error([&] { run_tokenize(options_); }, {"exists already", options_.output, "real.h5"});
  options_.if_exists = IfOutputExists::kReplace;
  options_.inputs.pop_back();
  run_tokenize(options_);
  EXPECT_EQ(TokenFile(file).documents(), 1);
  EXPECT_TRUE(fs::is_symlink(options_.output));
  fs::create_symlink("loop", folder_ / "loop");
  for (const IfOutputExists choice : {IfOutputExists::kError, IfOutputExists::kReplace}) {
    TokenizeOptions loop = options_;
    loop.output = (folder_ / "loop").string();
    loop.if_exists = choice;
    expect_user_error([&] { run_tokenize(loop); }, {"Too many levels of symbolic links", loop.output});
  }
  EXPECT_TRUE(fs::is_symlink(folder_ / "loop"));
}

TEST_F(TokenizeTest, DecodedTextsGoThroughLinksToOneFileEach) {
  namespace fs = std::filesystem;
  run_tokenize(options_);
  TokenizeOptions back = decoding();
  back.if_exists = IfOutputExists::kReplace;
  fs::create_directory(back.output);
  write_text(folder_ / "kept.txt", "old");
  fs::create_symlink("../kept.txt", folder_ / "texts/1_a.txt");
  run_tokenize(back);
  EXPECT_EQ(read_text(folder_ / "kept.txt"), "other");
  fs::remove(folder_ / "texts/a.txt");
  fs::create_symlink("1_a.txt", folder_ / "texts/a.txt");
  expect_user_error([&] { run_tokenize(back); }, {"another document", "texts/1_a.txt"});
  EXPECT_EQ(read_text(folder_ / "kept.txt"), "other");
}

TEST_F(TokenizeTest, FaultsLeaveNothingBehind) {
  const auto refuse = [&](const TokenizeOptions& options, std::initializer_list<std::string_view> words) {
    const int before = count_files(folder_.path());
    expect_user_error([&] { run_tokenize(options); }, words);
    EXPECT_EQ(count_files(folder_.path()), before);
  };
  TokenizeOptions options = options_;
  write_text(folder_ / "nul.txt", std::string("a\0b", 3));
  options.inputs.push_back((folder_ / "nul.txt").string());
  refuse(options, {"NUL byte", "nul.txt:1"});
  options.inputs.back() = (folder_ / "absent.txt").string();
  refuse(options, {"No such file", "absent.txt"});
  options.inputs[0] = (folder_ / "sub").string();
  write_text(folder_ / "empty.txt", "");
  options.inputs.push_back((folder_ / "empty.txt").string());
  refuse(options, {"3 documents cannot be read", "sub: ", "Is a directory", "absent.txt: ", "No such file",
                   "empty.txt: the document is empty"});
  for (int i = 0; i < 20; ++i)
    options.inputs.push_back((folder_ / text("absent_", i)).string());
  const std::string message =
      expect_user_error([&] { run_tokenize(options); }, {"at least 10 documents", "absent_6"});
  EXPECT_EQ(message.find("absent_7"), std::string::npos);
  options.inputs.clear();
  refuse(options, {"either text files", "--decode"});
  options = options_;
  options.decode = options.output;
  refuse(options, {"either text files"});
  options = options_;
  options.output = folder_.path().string();
  refuse(options, {"is a folder"});
  options.output = (folder_ / "absent/tokens.h5").string();
  refuse(options, {"No such file", "absent"});
  options = options_;
  options.model = (folder_ / "nowhere").string();
  EXPECT_EQ(
      expect_user_error([&] { run_tokenize(options); }, {"nowhere", "correct --model"}).find("model.path"),
      std::string::npos);
  options = options_;
  options.inputs.push_back(options.inputs.front());
  refuse(options, {"\"" + options.inputs.front() + "\" is there twice", "text files 1 and 3"});
  options.inputs.back() = (folder_ / "caf\xe9").string();
  options.inputs.front() = (folder_ / "caf\xe8").string();
  refuse(options, {"no UTF-8", "text files 1 and 3"});
}

TEST_F(TokenizeTest, RefusesTokensOfAnotherTokenizer) {
  run_tokenize(options_);
  std::ofstream(folder_ / "model/tokenizer.json", std::ios::app) << "\n";
  expect_user_error([&] { run_tokenize(decoding()); },
                    {"another tokenizer", "model/tokenizer.json", "sha256"});
  EXPECT_FALSE(std::filesystem::exists(folder_ / "texts"));
}

}  // namespace
}  // namespace longhalo

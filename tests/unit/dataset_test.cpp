// Documents, prompts and token files: good ones come back as they are, each fault is told with its place.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <limits>

#include "../storage/scratch.hpp"
#include "dataset/documents.hpp"
#include "dataset/token_file.hpp"
#include "storage/hdf5_writer.hpp"

namespace longhalo {
namespace {

using namespace testing;

TEST(Documents, AreReadAsTheyAre) {
  const ScratchFolder folder;
  const std::string odd = "a\r\nb\xff\xe2\x98\x83\n\n no newline at the end";
  write_text(folder / "a.txt", odd);
  const Document document = read_document(folder / "a.txt");
  EXPECT_EQ(document.text, odd);
  EXPECT_EQ(document.name, (folder / "a.txt").string());
}

TEST(Documents, FaultsNameTheirPlace) {
  const ScratchFolder folder;
  const std::filesystem::path file = folder / "a.txt";
  write_text(file, "");
  expect_user_error([&] { read_document(file); }, {"empty", file.string()});
  write_text(file, std::string("one\ntwo\nthr\0ee", 14));
  expect_user_error([&] { read_document(file); }, {"NUL byte at offset 11", file.string() + ":3"});
  write_text(file, "12345");
  expect_user_error([&] { read_document(file, 4); }, {"5 bytes", "4 are the most"});
  EXPECT_EQ(read_document(file, 5).text, "12345");
  expect_user_error([&] { read_document(folder.path()); }, {"Is a directory"});
  expect_user_error([&] { read_document(folder / "absent"); }, {"No such file"});
  expect_user_error([&] { read_document("/dev/zero"); }, {"not a regular file"});
  if (::geteuid() != 0) {
    std::filesystem::permissions(file, std::filesystem::perms::none);
    expect_user_error([&] { read_document(file); }, {"Permission denied"});
  }
}

TEST(Prompts, OneALine) {
  const ScratchFolder folder;
  write_text(folder / "p",
             "\xef\xbb\xbf"
             "What?\r\n\r\n  \t\n  Why so? \nlast");
  const Prompts prompts = read_prompts(folder / "p");
  EXPECT_EQ(prompts.texts, (std::vector<std::string>{"What?", "  Why so? ", "last"}));
  EXPECT_EQ(prompts.lines, (std::vector<int64_t>{1, 4, 5}));
  write_text(folder / "p", "\n \r\n");
  expect_user_error([&] { read_prompts(folder / "p"); }, {"no prompt"});
}

TEST(TokenFile, RoundTrip) {
  const ScratchFolder folder;
  // Vocabularies on both sides of 16 bits; more tokens than one block of the spool.
  for (const int64_t vocabulary : {int64_t{65536}, int64_t{65537}, int64_t{1} << 31}) {
    std::vector<int32_t> large((1 << 20) + 3);
    for (size_t i = 0; i < large.size(); ++i)
      large[i] = static_cast<int32_t>(i * 2654435761u % 65536);
    const std::vector<int32_t> edges{0, static_cast<int32_t>(vocabulary - 1)};
    const std::filesystem::path path = folder / "tokens.h5";
    {
      TokenFileWriter writer(path, {vocabulary, "model/tokenizer.json", "abc"});
      writer.append_document("first.txt", edges);
      writer.append_document("none", {});
      writer.append_document("dir/lärge.txt", large);
      EXPECT_EQ(writer.tokens(), static_cast<int64_t>(large.size()) + 2);
      writer.commit();
    }
    EXPECT_EQ(count_files(folder.path()), 1);
    const TokenFile file(path);
    EXPECT_EQ(file.info().vocabulary_size, vocabulary);
    EXPECT_EQ(file.info().tokenizer, "model/tokenizer.json");
    EXPECT_EQ(file.info().tokenizer_sha256, "abc");
    ASSERT_EQ(file.documents(), 3);
    EXPECT_EQ(file.document_name(2), "dir/lärge.txt");
    EXPECT_EQ(file.document_tokens(1), 0);
    EXPECT_EQ(file.read(0), edges);
    EXPECT_TRUE(file.read(1).empty());
    EXPECT_EQ(file.read(2), large);
    std::vector<int32_t> part(5);
    file.read(2, 1000, part);
    EXPECT_EQ(part, std::vector<int32_t>(large.begin() + 1000, large.begin() + 1005));
    EXPECT_THROW(file.read(2, file.document_tokens(2) - 4, part), InvariantError);
    EXPECT_EQ(Hdf5File::open(path).dataset("tokens").type(),
              vocabulary <= 65536 ? Hdf5Type::kUint16 : Hdf5Type::kUint32);
  }
}

TEST(TokenFile, WriterRefusesIdsBeyondTheVocabulary) {
  const ScratchFolder folder;
  TokenFileWriter writer(folder / "tokens.h5", {100, "", ""});
  expect_user_error(
      [&] {
        writer.append_document("a.txt", std::array<int32_t, 3>{1, 99, 100});
      },
      {"token id 100", "position 2", "vocabulary of 100", "a.txt"});
  expect_user_error([&] { writer.append_document("a.txt", std::array<int32_t, 1>{-1}); }, {"token id -1"});
}

TEST(TokenFile, AnUnfinishedFileLeavesTheOldOne) {
  const ScratchFolder folder;
  write_text(folder / "tokens.h5", "old");
  {
    TokenFileWriter writer(folder / "tokens.h5", {100, "", ""});
    writer.append_document("a.txt", std::array<int32_t, 3>{1, 2, 3});
  }
  EXPECT_EQ(read_text(folder / "tokens.h5"), "old");
  const std::vector<int32_t> many(100000, 1);
  {
    const FileSizeLimit limit(100000);
    TokenFileWriter writer(folder / "tokens.h5", {100, "", ""});
    expect_user_error([&] { writer.append_document("a.txt", many); }, {"bytes needed", "ulimit -f"});
  }
  EXPECT_EQ(read_text(folder / "tokens.h5"), "old");
  EXPECT_EQ(count_files(folder.path()), 1);
}

// A token file of another program, with one thing wrong at a time.
struct Parts {
  int64_t vocabulary = 10;
  std::vector<int64_t> offsets{0, 2, 4};
  std::vector<uint16_t> tokens{1, 2, 3, 9};
  std::vector<std::string> names{"a", "b"};
};

void write_parts(const std::filesystem::path& path, const Parts& parts) {
  Hdf5Writer writer(path, 0);
  writer.file().set_attribute("vocabulary_size", parts.vocabulary);
  writer.file().write_strings("document_names", parts.names);
  writer.write("document_offsets", {static_cast<int64_t>(parts.offsets.size())},
               std::span<const int64_t>(parts.offsets));
  writer.write("tokens", {static_cast<int64_t>(parts.tokens.size())},
               std::span<const uint16_t>(parts.tokens));
  writer.commit();
}

TEST(TokenFile, ReaderChecksEverything) {
  const ScratchFolder folder;
  const std::filesystem::path path = folder / "tokens.h5";
  const auto refuse = [&](const Parts& parts, std::initializer_list<std::string_view> words) {
    write_parts(path, parts);
    expect_user_error([&] { TokenFile file(path); }, words);
  };
  write_parts(path, {});
  EXPECT_EQ(TokenFile(path).read(1), (std::vector<int32_t>{3, 9}));
  refuse({.vocabulary = 0}, {"vocabulary_size is 0"});
  refuse({.vocabulary = std::numeric_limits<int64_t>::max()}, {"vocabulary_size"});
  refuse({.offsets = {}}, {"document_offsets is empty"});
  refuse({.offsets = {1, 2, 4}}, {"first offset is 1"});
  refuse({.offsets = {0, 3, 2}}, {"offset 2 is 2, less than the one before it, 3"});
  refuse({.offsets = {0, -1, 4}}, {"offset 1 is -1"});
  refuse({.offsets = {0, 2, 5}}, {"last offset is 5", "4 tokens"});
  refuse({.offsets = {0, 2, 3}}, {"last offset is 3", "4 tokens"});
  refuse({.names = {"a"}}, {"1 names for 2 documents"});

  write_parts(path, {.tokens = {1, 2, 3, 10}});
  const TokenFile file(path);
  EXPECT_EQ(file.read(0), (std::vector<int32_t>{1, 2}));
  expect_user_error([&] { file.read(1); },
                    {"token id 10", "position 1", "vocabulary of 10", "document 1 (b)", path.string()});

  Hdf5Writer writer(path, 0);
  writer.file().set_attribute("vocabulary_size", int64_t{10});
  writer.write("tokens", {1}, std::span<const float>(std::array<float, 1>{1}));
  writer.commit();
  expect_user_error([&] { TokenFile wrong(path); }, {"float32", "dataset tokens"});
  expect_user_error([&] { TokenFile absent(folder / "absent.h5"); }, {"No such file"});
}

TEST(TokenFile, IdsOf32BitsDoNotWrapAround) {
  const ScratchFolder folder;
  Hdf5Writer writer(folder / "t.h5", 0);
  writer.file().set_attribute("vocabulary_size", int64_t{100000});
  writer.write("document_offsets", {2}, std::span<const int64_t>(std::array<int64_t, 2>{0, 2}));
  writer.write("tokens", {2}, std::span<const uint32_t>(std::array<uint32_t, 2>{7, 4294967295U}));
  writer.commit();
  const TokenFile file(folder / "t.h5");
  EXPECT_EQ(file.document_name(0), "document_0");
  expect_user_error([&] { file.read(0); }, {"token id 4294967295", "position 1"});
}

TEST(TokenFile, H5pyOpensIt) {
  const std::string python = LONGHALO_PYTHON;
  if (std::system((python + " -c 'import h5py, numpy' 2>/dev/null").c_str()) != 0) {
    GTEST_SKIP() << python << " has no h5py; scripts/setup.sh installs it";
  }
  const ScratchFolder folder;
  TokenFileWriter writer(folder / "t.h5", {49152, "m/tokenizer.json", "00ff"});
  writer.append_document("a", std::array<int32_t, 3>{1, 2, 49151});
  writer.append_document("b", std::array<int32_t, 1>{4});
  writer.commit();
  write_text(folder / "check.py", R"(
import h5py, sys
with h5py.File(sys.argv[1]) as file:
    assert file["tokens"].dtype == "uint16" and list(file["tokens"]) == [1, 2, 49151, 4]
    assert file["document_offsets"].dtype == "int64" and list(file["document_offsets"]) == [0, 3, 4]
    assert list(file["document_names"].asstr()) == ["a", "b"]
    assert file.attrs["vocabulary_size"] == 49152
    assert "tokens 1" in str(file.attrs["format"]) and "00ff" in str(file.attrs["tokenizer_sha256"])
)");
  EXPECT_EQ(
      std::system((python + " " + (folder / "check.py").string() + " " + (folder / "t.h5").string()).c_str()),
      0);
}

}  // namespace
}  // namespace longhalo

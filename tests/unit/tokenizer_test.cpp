// What the tokenizers promise beside agreeing with the packages: exact bytes, any length, several threads,
// progress.
#include "tokenizer/tokenizer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "core/log.hpp"
#include "core/text.hpp"
#include "tokenizer/bpe_merges.hpp"
#include "tokenizer/normalizer.hpp"
#include "tokenizer/utf8.hpp"
#include "tokenizer/word_cache.hpp"
#include "tokenizer_fixture.hpp"

namespace longhalo {
namespace {

using test::kAdded;
using test::kSpecial;
using Ids = std::vector<int32_t>;

std::string random_bytes(std::mt19937& random, size_t count, std::string_view alphabet) {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) {
    bytes += alphabet.empty() ? static_cast<char>(random() % 256) : alphabet[random() % alphabet.size()];
  }
  return bytes;
}

TEST(Tokenizer, KnownIds) {
  const auto tokenizer = test::load_description(test::tiny_description());
  EXPECT_EQ(tokenizer->encode("", SpecialTokens::kAsText), Ids{});
  EXPECT_EQ(tokenizer->encode("cab aaaaa", SpecialTokens::kAsText), (Ids{test::kCab, ' ', test::kA4, 'a'}));
  EXPECT_EQ(tokenizer->encode("<|s|>b", SpecialTokens::kAsText), (Ids{'<', '|', 's', '|', '>', 'b'}));
  EXPECT_EQ(tokenizer->encode("<|s|>b", SpecialTokens::kParse), (Ids{kSpecial, 'b'}));
  EXPECT_EQ(tokenizer->encode("<add>b", SpecialTokens::kAsText), (Ids{kAdded, 'b'}));
  EXPECT_EQ(tokenizer->decode(Ids{kSpecial, test::kCab, 0xFF, kAdded}), "<|s|>cab\xFF<add>");
  EXPECT_EQ(tokenizer->vocabulary_size(), kAdded + 1);
  EXPECT_EQ(tokenizer->token_id("<|s|>"), kSpecial);
  EXPECT_EQ(tokenizer->token_id("cab"), test::kCab);
  EXPECT_EQ(tokenizer->token_id("abc"), std::nullopt);
  EXPECT_TRUE(tokenizer->prefix().empty());
}

TEST(Tokenizer, TextBytesAreThoseOfTheText) {
  const auto tokenizer = test::load_description(test::tiny_description());
  EXPECT_EQ(tokenizer->text_bytes(kSpecial), 0);
  EXPECT_EQ(tokenizer->text_bytes(kAdded), 5);
  EXPECT_EQ(tokenizer->text_bytes(test::kCab), 3);
  EXPECT_EQ(tokenizer->text_bytes(0xFF), 1);
  EXPECT_EQ(tokenizer->text_bytes(-1), 0);
  EXPECT_EQ(tokenizer->text_bytes(1 << 20), 0);
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    const std::string text = random_bytes(random, 500, round % 2 == 0 ? "" : "abc ");
    int64_t bytes = 0;
    for (const int32_t id : tokenizer->encode(text, SpecialTokens::kAsText))
      bytes += tokenizer->text_bytes(id);
    EXPECT_EQ(bytes, static_cast<int64_t>(text.size()));
  }
}

TEST(Tokenizer, AffixesComeFromThePostProcessor) {
  auto description = test::tiny_description();
  const auto special = [](const char* name) {
    return nlohmann::json{{"SpecialToken", {{"id", name}, {"type_id", 0}}}};
  };
  description["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single", {special("<|s|>"), {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}, special("<add>")}},
      {"pair", nlohmann::json::array()},
      {"special_tokens",
       {{"<|s|>", {{"id", "<|s|>"}, {"ids", {kSpecial}}, {"tokens", {"<|s|>"}}}},
        {"<add>", {{"id", "<add>"}, {"ids", {kAdded, kAdded}}, {"tokens", {"<add>", "<add>"}}}}}}};
  const auto tokenizer = test::load_description(description);
  EXPECT_EQ(tokenizer->prefix(), Ids{kSpecial});
  EXPECT_EQ(tokenizer->suffix(), (Ids{kAdded, kAdded}));
}

TEST(Tokenizer, AnyBytesComeBack) {
  for (const char* kind : {"gpt2", "smollm2", "llama3", "qwen2"}) {
    auto description = test::tiny_description();
    description["pre_tokenizer"] = test::pre_tokenizer(kind);
    const auto tokenizer = test::load_description(description);
    std::mt19937 random(5);
    for (int round = 0; round < 400; ++round) {
      const auto alphabet =
          round % 2 == 0 ? std::string_view() : std::string_view("a '\n\r\t1<|s>\xC3\xA9\xE2\x80\x83");
      const std::string bytes = random_bytes(random, random() % 200, alphabet);
      const auto ids = tokenizer->encode(bytes, SpecialTokens::kAsText);
      ASSERT_EQ(tokenizer->decode(ids), bytes) << kind << " round " << round;
      ASSERT_EQ(tokenizer->decode(tokenizer->encode(bytes, SpecialTokens::kParse)), bytes) << kind;
    }
  }
}

TEST(Tokenizer, ByteTokenizerGivesEveryByteItsOwnNumber) {
  const auto tokenizer = Tokenizer::load(LONGHALO_SOURCE_DIR "/data/byte_tokenizer");
  EXPECT_EQ(tokenizer->vocabulary_size(), 256);
  EXPECT_TRUE(tokenizer->prefix().empty());
  EXPECT_TRUE(tokenizer->suffix().empty());
  std::string all;
  for (int byte = 0; byte < 256; ++byte)
    all += static_cast<char>(byte);
  std::mt19937 random(7);
  for (const std::string& text :
       {all, std::string("<|s|> Gr\xC3\xBC\xC3\x9F\x65, \xE6\xB0\xB4 \xF0\x9F\x8D\x8C\r\n\t  z"),
        random_bytes(random, 100'000, "")}) {
    const auto ids = tokenizer->encode(text, SpecialTokens::kAsText);
    ASSERT_EQ(ids.size(), text.size());
    for (size_t i = 0; i < text.size(); ++i)
      ASSERT_EQ(ids[i], static_cast<unsigned char>(text[i])) << i;
    EXPECT_EQ(tokenizer->encode(text, SpecialTokens::kParse), ids);
    EXPECT_EQ(tokenizer->decode(ids), text);
    EXPECT_EQ(tokenizer->text_bytes(ids.back()), 1);
  }
}

TEST(Tokenizer, InvalidBytesStandAlone) {
  const auto tokenizer = test::load_description(test::tiny_description());
  EXPECT_EQ(tokenizer->encode("a\xFF"
                              "aa\xE2\x82z",
                              SpecialTokens::kAsText),
            (Ids{'a', 0xFF, test::kA2, 0xE2, 0x82, 'z'}));
}

TEST(Tokenizer, RunsOfTenMegabytes) {
#if defined(__SANITIZE_ADDRESS__)
  constexpr size_t kRun_bytes = 1'000'000;  // the sanitizers make it ten times slower
#else
  constexpr size_t kRun_bytes = 10'000'000;
#endif
  const auto check_run = [&](const char* kind, const std::string& text, size_t expected_ids) {
    auto description = test::tiny_description();
    description["pre_tokenizer"] = test::pre_tokenizer(kind);
    const auto tokenizer = test::load_description(description);
    const auto ids = tokenizer->encode(text, SpecialTokens::kAsText);
    EXPECT_EQ(ids.size(), expected_ids) << kind << " '" << text.front() << "'";
    EXPECT_TRUE(tokenizer->decode(ids) == text) << kind << " '" << text.front() << "'";
  };
  // The last space belongs to the word; of the spaces before it, three are no whole four: a two and a one.
  // Then ' ' and 'x'.
  constexpr size_t kSpacesThenWord = kRun_bytes / 4 - 1 + 4;
  check_run("smollm2", std::string(kRun_bytes, ' ') + "x", kSpacesThenWord);
  check_run("llama3", std::string(kRun_bytes, ' ') + "x", kSpacesThenWord);
  check_run("llama3", std::string(kRun_bytes, 'a'), kRun_bytes / 4);
  check_run("smollm2", std::string(kRun_bytes, '1'), kRun_bytes);
  check_run("llama3", std::string(kRun_bytes, '1'), kRun_bytes);
  check_run("qwen2", std::string(kRun_bytes, '\n'), kRun_bytes);
}

TEST(Tokenizer, LeavesOutBytesThatHaveNoToken) {
  set_log_level(LogLevel::kError);
  auto description = test::tiny_description();
  description["model"]["vocab"].erase("z");
  EXPECT_EQ(test::load_description(description)->encode("azb", SpecialTokens::kAsText), Ids{test::kAb});
  description["model"]["unk_token"] = "?";
  EXPECT_EQ(test::load_description(description)->encode("azzb", SpecialTokens::kAsText),
            (Ids{'a', '?', '?', 'b'}));
  description["model"]["fuse_unk"] = true;
  EXPECT_EQ(test::load_description(description)->encode("azzb", SpecialTokens::kAsText),
            (Ids{'a', '?', 'b'}));
  set_log_level(LogLevel::kInfo);
}

TEST(Tokenizer, SeveralThreadsAtOnce) {
  const auto tokenizer = test::load_description(test::tiny_description());
  std::mt19937 random(3);
  const std::string text = random_bytes(random, 200'000, "abc  \n12'");
  const auto expected = tokenizer->encode(text, SpecialTokens::kAsText);
  std::vector<int> agreed(4, 0);
  std::vector<std::thread> threads;
  for (int& result : agreed) {
    threads.emplace_back(
        [&] { result = tokenizer->encode(text, SpecialTokens::kAsText) == expected ? 1 : 0; });
  }
  for (auto& thread : threads)
    thread.join();
  EXPECT_EQ(agreed, std::vector<int>(4, 1));
}

TEST(Tokenizer, ProgressGrowsToTheEnd) {
  const auto tokenizer = test::load_description(test::tiny_description());
  std::string text;
  for (int i = 0; i < 300'000; ++i)
    text += "word \xFF";
  std::vector<int64_t> done;
  tokenizer->encode(text, SpecialTokens::kAsText, [&](int64_t bytes, int64_t total) {
    EXPECT_EQ(total, static_cast<int64_t>(text.size()));
    done.push_back(bytes);
  });
  EXPECT_GE(done.size(), 5U);
  EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
  EXPECT_EQ(done.back(), static_cast<int64_t>(text.size()));
}

/// The definition: again and again the pair of lowest rank, leftmost first.
Ids merge_by_definition(const MergeTable& merges, Ids ids) {
  while (true) {
    const Merge* best = nullptr;
    size_t at = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const Merge* merge = merges.find(ids[i], ids[i + 1]);
      if (merge != nullptr && (best == nullptr || merge->rank < best->rank)) {
        best = merge;
        at = i;
      }
    }
    if (best == nullptr) return ids;
    ids[at] = best->result;
    ids.erase(ids.begin() + static_cast<ptrdiff_t>(at) + 1);
  }
}

TEST(Merges, ScanAndHeapFollowTheDefinition) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    const int32_t letters = 2 + static_cast<int32_t>(random() % 4);
    const int32_t count = 1 + static_cast<int32_t>(random() % 60);
    MergeTable merges(count);
    for (int32_t rank = 0; rank < count; ++rank) {  // each merge makes a new token of any two before it
      const int32_t known = letters + rank;
      const auto any_known = [&] { return static_cast<int32_t>(random() % static_cast<uint32_t>(known)); };
      const int32_t left = any_known();
      merges.insert(left, any_known(), {rank, known});
    }
    Ids ids(random() % 120);
    for (int32_t& id : ids)
      id = static_cast<int32_t>(random() % static_cast<uint32_t>(letters));
    const Ids expected = merge_by_definition(merges, ids);
    MergeScratch scratch;
    Ids scanned = ids;
    Ids heaped = ids;
    detail::merge_by_scan(merges, scanned, scratch);
    detail::merge_by_heap(merges, heaped, scratch);
    ASSERT_EQ(scanned, expected) << "round " << round;
    ASSERT_EQ(heaped, expected) << "round " << round;
  }
}

TEST(WordCache, HoldsWhatItWasGivenAndStaysBounded) {
  WordCache cache;
  for (int32_t i = 0; i < 200'000; ++i) {
    const std::string word = text("w", i);
    ASSERT_FALSE(cache.find(word));
    cache.insert(word, Ids{i, -i});
    const auto found = cache.find(word);
    ASSERT_TRUE(found);
    ASSERT_EQ(Ids(found->begin(), found->end()), (Ids{i, -i}));
  }
  EXPECT_FALSE(cache.find("w0"));  // long forgotten
}

TEST(Utf8, AcceptsExactlyWhatIsValid) {
  const auto valid = [](std::string_view bytes) { return valid_utf8_prefix(bytes) == bytes.size(); };
  for (const std::string_view good :
       {"", "a", "\x7F", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80",
        "\xEF\xBF\xBF", "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_TRUE(valid(good));
  }
  for (const std::string_view bad :
       {"\x80", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xED\xBF\xBF", "\xF0\x8F\xBF\xBF",
        "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xC2", "\xE2\x82", "\xF0\x9F\x98", "\xC2\x41",
        "\xE2\x82\x41"}) {
    EXPECT_FALSE(valid(bad));
    EXPECT_EQ(valid_utf8_prefix("12345678" + std::string(bad) + "12345678"), 8U);
  }
  for (uint32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string bytes;
    append_utf8(bytes, c);
    ASSERT_EQ(code_point_at(bytes, 0).value, c);
    ASSERT_EQ(code_point_before(bytes, bytes.size()).value, c);
  }
}

TEST(Nfc, ComposesOrdersAndStaysFast) {
  if (!nfc_available()) GTEST_SKIP() << "this build has no utf8proc";
  EXPECT_EQ(nfc("plain \xC3\xA9 text"), "plain \xC3\xA9 text");
  EXPECT_EQ(nfc("e\u0301"), "\u00E9");
  EXPECT_EQ(nfc("xe\u0301y"), "x\u00E9y");
  EXPECT_EQ(nfc("\u00E9\u0323"), "\u1EB9\u0301");  // the mark below comes first and composes
  EXPECT_EQ(nfc("\u1100\u1161\u11A8"), "\uAC01");  // Hangul
  EXPECT_EQ(nfc("\u212B\u2126\u0344"),
            "\u00C5\u03A9\u0308\u0301");  // singletons, and an excluded composition
  EXPECT_EQ(nfc("\u0301a"), "\u0301a");
  std::string marks = "a";
  for (int i = 0; i < 200'000; ++i)
    marks += "\u0301\u0316";
  const std::string ordered = nfc(marks);
  EXPECT_EQ(ordered.size(), marks.size() - 1);  // one mark composes with the a: 3 bytes become 2
  EXPECT_EQ(ordered.substr(0, 4), "\u00E1\u0316");
  EXPECT_EQ(nfc(ordered) == ordered, true);
}

}  // namespace
}  // namespace longhalo

// Files that are damaged, inconsistent or ask for more than LongHalo does: a UserError that names file, place
// and feature, never a crash and never a guess.
#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "core/log.hpp"
#include "core/text.hpp"
#include "tokenizer/pattern.hpp"
#include "tokenizer_fixture.hpp"

namespace longhalo {
namespace {

using nlohmann::json;
using test::user_error_of;

struct Fault {
  const char* pointer;  // where in the tiny description
  json value;           // what stands there instead
  const char* message;  // a part of the complaint
  const char* where;    // the place it must name
};

TEST(TokenizerErrors, EachFaultIsNamed) {
  const json byte_level = {{"type", "ByteLevel"}};
  const auto split = [&](const json& pattern, const char* behavior) {
    return json{
        {"type", "Sequence"},
        {"pretokenizers", {{{"type", "Split"}, {"pattern", pattern}, {"behavior", behavior}}, byte_level}}};
  };
  const std::vector<Fault> faults = {
      {"/model/merges", json::array(), "no merges", "at model.merges"},
      {"/model/merges", nullptr, "an array is needed", "at model.merges"},
      {"/model/merges/2", "a", "a merge is two tokens", "at model.merges[2]"},
      {"/model/merges/2", "a b c", "a merge is two tokens", "at model.merges[2]"},
      {"/model/merges/2", json::array({"xy", "a"}), "\"xy\", which the vocabulary lacks",
       "at model.merges[2]"},
      {"/model/merges/2", json::array({"b", "b"}), "\"bb\", which the vocabulary lacks",
       "at model.merges[2]"},
      {"/model/vocab/ab", 3, "used by another token", "at model.vocab."},
      {"/model/vocab/ab", -1, "a token id is a whole number", "at model.vocab.ab"},
      {"/model/vocab/ab", 1.5, "a token id is a whole number", "at model.vocab.ab"},
      {"/model/vocab/ab", 4'000'000'000, "a token id is a whole number", "at model.vocab.ab"},
      {"/model/vocab", "x", "an object is needed", "at model.vocab"},
      {"/model/type", "WordPiece", "the tokenizer model WordPiece is not supported", "at model.type"},
      {"/model/byte_fallback", true, "byte_fallback is not supported", "at model.byte_fallback"},
      {"/model/dropout", 0.1, "dropout", "at model.dropout"},
      {"/model/end_of_word_suffix", "</w>", "end_of_word_suffix is not supported",
       "at model.end_of_word_suffix"},
      {"/model/unk_token", "<none>", "the unknown token is not in the vocabulary", "at model.unk_token"},
      {"/model/novelty", 1, "the key \"novelty\" is not supported", "at model"},
      {"/normalizer", {{"type", "Lowercase"}}, "the normalizer Lowercase is not supported", "at normalizer"},
      {"/normalizer",
       {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}, {{"type", "Strip"}}}}},
       "several normalizers",
       "at normalizer.normalizers"},
      {"/decoder", {{"type", "Metaspace"}}, "the decoder Metaspace is not supported", "at decoder"},
      {"/decoder", nullptr, "an object is needed", "at decoder"},
      {"/truncation", {{"max_length", 512}}, "truncation is not supported", "at truncation"},
      {"/padding", {{"length", 1}}, "padding is not supported", "at padding"},
      {"/pre_tokenizer", nullptr, "an object is needed", "at pre_tokenizer"},
      {"/pre_tokenizer",
       {{"type", "Metaspace"}},
       "the pre-tokenizer Metaspace is not supported",
       "at pre_tokenizer"},
      {"/pre_tokenizer", {{"type", "Digits"}}, "does not end in ByteLevel", "at pre_tokenizer"},
      {"/pre_tokenizer",
       {{"type", "Sequence"}, {"pretokenizers", {byte_level, byte_level}}},
       "after ByteLevel",
       "at pre_tokenizer.pretokenizers[1]"},
      {"/pre_tokenizer", split({{"Regex", "a|\\w"}}, "Isolated"), "'\\w' is not supported",
       "at pre_tokenizer.pretokenizers[0].pattern.Regex"},
      {"/pre_tokenizer", split({{"Regex", "a*"}}, "Isolated"), "may match the empty string", "pattern.Regex"},
      {"/pre_tokenizer", split({{"String", ""}}, "Isolated"), "may match the empty string", "pattern"},
      {"/pre_tokenizer", split({{"String", "a"}}, "Sideways"), "the split behavior Sideways", ".behavior"},
      {"/post_processor",
       {{"type", "BertProcessing"}},
       "the post-processor BertProcessing",
       "at post_processor"},
      {"/added_tokens/0/id", 3, "contradicts another token", "at added_tokens[0].id"},
      {"/added_tokens/0/id", test::kAdded, "contradicts another token", "at added_tokens[1].id"},
      {"/added_tokens/0/content", "", "without a content", "at added_tokens[0].content"},
      {"/added_tokens/0/content", "<add>", "is added twice", "at added_tokens[1].content"},
      {"/added_tokens/0/content", "cab", "contradicts another token", "at added_tokens[0].id"},
      {"/added_tokens/0/special", "yes", "true or false is needed", "at added_tokens[0].special"},
      {"/novelty", 1, "the key \"novelty\" is not supported", "tokenizer.json"},
  };
  for (const Fault& fault : faults) {
    json description = test::tiny_description();
    description[json::json_pointer(fault.pointer)] = fault.value;
    const std::string message = user_error_of([&] { test::load_description(description); });
    EXPECT_NE(message.find(fault.message), std::string::npos) << fault.pointer << ": " << message;
    EXPECT_NE(message.find(fault.where), std::string::npos) << fault.pointer << ": " << message;
    EXPECT_NE(message.find("tokenizer.json"), std::string::npos) << fault.pointer << ": " << message;
  }
}

TEST(TokenizerErrors, MissingAndDamagedFiles) {
  const test::ScratchFolder folder;
  const auto load = [&] { Tokenizer::load(folder.path()); };
  EXPECT_NE(user_error_of(load).find("neither tokenizer.json nor tokenizer.model"), std::string::npos);
  EXPECT_NE(user_error_of([&] {
              Tokenizer::load(folder.path() / "absent");
            }).find("cannot be opened: No such file or directory"),
            std::string::npos);
  folder.write("tokenizer.json", R"({"model": )");
  EXPECT_NE(user_error_of(load).find("not valid JSON"), std::string::npos);
  folder.write("tokenizer.json", "");
  EXPECT_NE(user_error_of(load).find("not valid JSON"), std::string::npos);
  folder.write("tokenizer.json", "\"\xFF\"");
  EXPECT_NE(user_error_of(load).find("not valid JSON"), std::string::npos);
  folder.write("tokenizer.json", std::string(1'000'000, '['));
  EXPECT_NE(user_error_of(load).find("nested more than"), std::string::npos);
  folder.write("tokenizer.json", "[]");
  EXPECT_NE(user_error_of(load).find("an object is needed"), std::string::npos);
}

TEST(TokenizerErrors, IdsThatAreNoTokens) {
  const auto tokenizer = test::load_description(test::tiny_description());
  for (const int32_t id : {-1, test::kAdded + 1, INT32_MAX, INT32_MIN}) {
    const std::string message = user_error_of([&] { tokenizer->decode(std::vector<int32_t>{'a', id}); });
    EXPECT_NE(message.find(text("the id ", id, " is no token")), std::string::npos) << message;
  }
}

TEST(TokenizerErrors, PatternsThatMeanSomethingElseHere) {
  for (const char* bad :
       {"a.b",     "^a",          "a$",     "\\bx",   "\\h+",     "a{,3}",      "a{1,3}+",
        "(?<n>a)", "(?<=a)b",     "(?m:a)", "(a)\\1", "\\p{Han}", "\\pL",       "\\p{^L}",
        "[a[b]]",  "[a&&b]",      "[]a]",   "[\\S]",  "[\\s-x]",  "(?i:[a-z])", "(?i:\\p{Lu})",
        "(a+)+",   "(?:a*b{2})*", "(a",     "a)",     "[a",       "a\\",        "(?:(?:a+)b)+"}) {
    EXPECT_THROW(Pattern::regex(bad, "test"), UserError) << bad;
  }
  for (const char* good : {"a|b", "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+", "\\p{N}{1,3}", "\\s+(?!\\S)", "(?i:'s|'t)",
                           "[a\\-b]", "\\d", "(?:ab)+", "[\\p{Lu}\\p{M}]+[\\s]*x", "\\[\\]", "x++"}) {
    EXPECT_NO_THROW(Pattern::regex(good, "test")) << good;
  }
}

/// Bytes changed, removed, doubled; most results are no JSON, many are another description.
std::string mutated(std::string content, std::mt19937& random) {
  constexpr std::string_view kTokens = "{}[],:\"\\0123456789-.eaĠtruefalsn";
  const int changes = 1 + static_cast<int>(random() % 3);
  for (int i = 0; i < changes; ++i) {
    const size_t at = random() % content.size();
    const size_t length = std::min<size_t>(1 + random() % 40, content.size() - at);
    switch (random() % 4) {
      case 0:
        content[at] = kTokens[random() % kTokens.size()];
        break;
      case 1:
        content.erase(at, length);
        break;
      case 2:
        content.insert(at, content.substr(random() % content.size(), length));
        break;
      default:
        content.insert(at, 1, kTokens[random() % kTokens.size()]);
    }
  }
  return content;
}

/// A value somewhere outside the vocabulary becomes another one: still JSON, seldom a description.
json misdescribed(json description, std::mt19937& random) {
  const std::vector<json> values = {
      nullptr, true,  0,          -1,    300,           1e300,          "",
      "a",     "NFC", "\xC4\xA0", "a b", json::array(), json::object(), {{"type", "Split"}}};
  std::vector<std::string> places;
  const json flat = description.flatten();
  for (const auto& [pointer, unused] : flat.items()) {
    for (size_t end = pointer.size(); end != 0; end = pointer.rfind('/', end - 1)) {
      places.push_back(pointer.substr(0, end));  // the value itself and everything that holds it
    }
  }
  const bool in_vocabulary = random() % 10 == 0;
  std::erase_if(
      places, [&](const std::string& place) { return place.starts_with("/model/vocab/") != in_vocabulary; });
  description[json::json_pointer(places[random() % places.size()])] = values[random() % values.size()];
  return description;
}

TEST(TokenizerErrors, DamagedDescriptionsAreRefusedOrWork) {
  set_log_level(LogLevel::kError);
  json description = test::tiny_description();
  description["pre_tokenizer"] = test::pre_tokenizer("llama3");
  const std::string content = description.dump();
  const test::ScratchFolder folder;
  std::mt19937 random(17);
  int refused = 0;
  int loaded = 0;
  for (int round = 0; round < 3000; ++round) {
    const bool as_bytes = round % 2 == 0;
    folder.write("tokenizer.json",
                 as_bytes ? mutated(content, random) : misdescribed(description, random).dump());
    try {
      const auto tokenizer = Tokenizer::load(folder.path());
      const auto ids = tokenizer->encode("cab aaaa<|s|> 123\n\n  '\xFF\u00E9", SpecialTokens::kParse);
      tokenizer->decode(ids);
      ++loaded;
    } catch (const UserError&) {
      ++refused;
    }
  }
  set_log_level(LogLevel::kInfo);
  EXPECT_GT(refused, 100);
  EXPECT_GT(loaded, 10);
}

}  // namespace
}  // namespace longhalo

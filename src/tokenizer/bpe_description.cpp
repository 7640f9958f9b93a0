#include "tokenizer/bpe_description.hpp"

#include <set>
#include <unordered_set>

#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr const char* kFetchAgain = "fetch the file again from where the model came from";

int32_t read_id(const JsonCursor& value) {
  const int64_t id = value.integer();
  if (id < 0 || id >= kLargestVocabulary) {
    value.fail(text("a token id is a whole number from 0 to ", kLargestVocabulary - 1), kFetchAgain);
  }
  return static_cast<int32_t>(id);
}

/// The "single" template: special tokens around one sequence A.
Affixes read_template(const JsonCursor& processor) {
  processor.only_keys({"type", "single", "pair", "special_tokens"});
  const JsonCursor parts = processor["single"];
  Affixes affixes;
  int sequences = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const JsonCursor part = parts.at(i);
    part.only_keys({"SpecialToken", "Sequence"});
    if (const auto sequence = part.find("Sequence")) {
      if ((*sequence)["id"].string() != "A" || ++sequences > 1)
        part.unsupported("a template of more than one text");
      continue;
    }
    const JsonCursor ids = processor["special_tokens"][part["SpecialToken"]["id"].string()]["ids"];
    auto& side = sequences == 0 ? affixes.prefix : affixes.suffix;
    for (size_t k = 0; k < ids.size(); ++k)
      side.push_back(read_id(ids.at(k)));
  }
  if (sequences != 1) parts.unsupported("a template without a text");
  return affixes;
}

void add_affixes(const JsonCursor& processor, Affixes& all) {
  const std::string type = processor["type"].string();
  if (type == "ByteLevel") {
    // Changes offsets only, which are not used here.
  } else if (type == "TemplateProcessing") {
    const Affixes affixes = read_template(processor);
    all.prefix.insert(all.prefix.begin(), affixes.prefix.begin(), affixes.prefix.end());
    all.suffix.insert(all.suffix.end(), affixes.suffix.begin(), affixes.suffix.end());
  } else {
    processor.unsupported(text("the post-processor ", type));
  }
}

}  // namespace

void check_top_level(const JsonCursor& tokenizer) {
  tokenizer.only_keys({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                       "post_processor", "decoder", "model"});
  for (const std::string_view part : {"truncation", "padding"}) {
    if (const auto value = tokenizer.find(part)) {
      value->fail(text(part, " is not supported"), text("set \"", part, "\" to null in this file"));
    }
  }
  const JsonCursor decoder = tokenizer["decoder"];
  const std::string type = decoder["type"].string();
  if (type != "ByteLevel") decoder.unsupported(text("the decoder ", type));
}

std::vector<AddedToken> read_added_tokens(const JsonCursor& tokenizer, const BpeModel& model) {
  std::vector<AddedToken> tokens;
  const auto list = tokenizer.find("added_tokens");
  if (!list) return tokens;
  std::unordered_set<std::string> contents;
  std::set<int32_t> ids;
  for (size_t i = 0; i < list->size(); ++i) {
    const JsonCursor entry = list->at(i);
    entry.only_keys({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token;
    token.id = read_id(entry["id"]);
    token.content = entry["content"].string();
    token.special = entry.boolean_or("special", false);
    token.single_word = entry.boolean_or("single_word", false);
    token.left_strip = entry.boolean_or("lstrip", false);
    token.right_strip = entry.boolean_or("rstrip", false);
    token.normalized = entry.boolean_or("normalized", !token.special);
    if (token.content.empty()) entry["content"].fail("an added token without a content", kFetchAgain);
    if (!contents.insert(token.content).second) {
      entry["content"].fail(text("the token \"", token.content, "\" is added twice"), kFetchAgain);
    }
    const auto in_vocabulary = model.token_id(token.content);
    const bool taken = in_vocabulary ? *in_vocabulary != token.id
                                     : token.id < model.size() && model.bytes_of(token.id).has_value();
    if (taken || !ids.insert(token.id).second) {
      entry["id"].fail(text("the id ", token.id, " of \"", token.content, "\" contradicts another token"),
                       kFetchAgain);
    }
    tokens.push_back(std::move(token));
  }
  return tokens;
}

Affixes read_affixes(const JsonCursor& tokenizer) {
  Affixes all;
  const auto processor = tokenizer.find("post_processor");
  if (!processor) return all;
  if ((*processor)["type"].string() != "Sequence") {
    add_affixes(*processor, all);
    return all;
  }
  processor->only_keys({"type", "processors"});
  const JsonCursor parts = (*processor)["processors"];
  for (size_t i = 0; i < parts.size(); ++i)
    add_affixes(parts.at(i), all);
  return all;
}

}  // namespace longhalo

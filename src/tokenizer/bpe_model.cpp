#include "tokenizer/bpe_model.hpp"

#include <algorithm>
#include <utility>

#include "core/text.hpp"
#include "tokenizer/byte_alphabet.hpp"
#include "tokenizer/utf8.hpp"

namespace longhalo {
namespace {

constexpr const char* kFetchAgain = "fetch the file again from where the model came from";

/// The two tokens of a merge, written "a b" or ["a", "b"].
std::pair<std::string, std::string> read_merge(const JsonCursor& merges, size_t index) {
  const nlohmann::json& value = merges.array()[index];
  if (value.is_string()) {
    const auto& joined = value.get_ref<const std::string&>();
    const size_t space = joined.find(' ');
    if (space != std::string::npos && joined.find(' ', space + 1) == std::string::npos) {
      return {joined.substr(0, space), joined.substr(space + 1)};
    }
  } else if (value.is_array() && value.size() == 2 && value[0].is_string() && value[1].is_string()) {
    return {value[0].get<std::string>(), value[1].get<std::string>()};
  }
  merges.at(index).fail("a merge is two tokens, as \"a b\" or [\"a\", \"b\"]", kFetchAgain);
}

}  // namespace

BpeModel::BpeModel(const JsonCursor& description) {
  read_options(description);
  read_vocabulary(description["vocab"]);
  read_merges(description["merges"]);
  find_byte_tokens(description);
}

void BpeModel::read_options(const JsonCursor& description) {
  // Files older than the "type" key hold BPE models too.
  if (const auto type = description.find("type"); type && type->string() != "BPE") {
    type->unsupported(text("the tokenizer model ", type->string()));
  }
  description.only_keys({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                         "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (const auto dropout = description.find("dropout")) {
    const bool is_zero = dropout->is_number() && dropout->number() == 0.0;
    if (!is_zero) dropout->unsupported("dropout (it makes tokens random)");
  }
  for (const std::string_view affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const auto value = description.find(affix);
    if (value && !value->string().empty()) value->unsupported(affix);
  }
  if (description.boolean_or("byte_fallback", false))
    description["byte_fallback"].unsupported("byte_fallback");
  fuse_unknown_ = description.boolean_or("fuse_unk", false);
  ignore_merges_ = description.boolean_or("ignore_merges", false);
}

void BpeModel::read_vocabulary(const JsonCursor& vocabulary) {
  int64_t largest = -1;
  for (const auto& [spelling, value] : vocabulary.object().items()) {
    const int64_t id = value.is_number_integer() ? value.get<int64_t>() : -1;
    if (id < 0 || id >= kLargestVocabulary) {
      vocabulary[spelling].fail(text("a token id is a whole number from 0 to ", kLargestVocabulary - 1),
                                kFetchAgain);
    }
    largest = std::max(largest, id);
  }
  bytes_of_.resize(static_cast<size_t>(largest + 1));
  id_of_.reserve(vocabulary.object().size());
  for (const auto& [spelling, value] : vocabulary.object().items()) {
    const auto id = value.get<int32_t>();
    auto& bytes = bytes_of_[static_cast<size_t>(id)];
    if (bytes) vocabulary[spelling].fail(text("the id ", id, " is used by another token too"), kFetchAgain);
    const auto spelled_bytes = bytes_of_spelling(spelling);
    bytes = spelled_bytes.value_or(spelling);
    id_of_.emplace(spelling, id);
    if (ignore_merges_ && spelled_bytes) whole_piece_.emplace(*spelled_bytes, id);
  }
}

void BpeModel::read_merges(const JsonCursor& merges) {
  const size_t count = merges.size();
  // A vocabulary of bytes alone needs none; in a larger one, most tokens could never come about.
  if (count == 0 && id_of_.size() > byte_token_.size())
    merges.fail("the tokenizer has no merges", kFetchAgain);
  merges_ = MergeTable(static_cast<int64_t>(count));
  const auto known = [&](size_t index, const std::string& token) {
    const auto id = token_id(token);
    if (!id)
      merges.at(index).fail(text("the merge needs the token \"", token, "\", which the vocabulary lacks"),
                            kFetchAgain);
    return *id;
  };
  for (size_t i = 0; i < count; ++i) {
    const auto [left, right] = read_merge(merges, i);
    const int32_t left_id = known(i, left);
    const int32_t right_id = known(i, right);
    merges_.insert(left_id, right_id, {static_cast<int32_t>(i), known(i, left + right)});
  }
}

void BpeModel::find_byte_tokens(const JsonCursor& description) {
  int32_t unknown_token = kNone;
  if (const auto unknown = description.find("unk_token")) {
    const auto id = token_id(unknown->string());
    if (!id) unknown->fail("the unknown token is not in the vocabulary", kFetchAgain);
    unknown_token = *id;
  }
  for (size_t byte = 0; byte < 256; ++byte) {
    std::string spelling;
    append_utf8(spelling, byte_alphabet()[byte]);
    const auto id = token_id(spelling);
    byte_token_[byte] = id.value_or(unknown_token);
    is_unknown_[byte] = !id && unknown_token != kNone;
  }
}

void BpeModel::encode_piece(std::string_view piece, std::vector<int32_t>& ids, MergeScratch& scratch) const {
  ids.clear();
  if (ignore_merges_) {
    if (const auto whole = whole_piece_.find(piece); whole != whole_piece_.end()) {
      ids.push_back(whole->second);
      return;
    }
  }
  bool previous_unknown = false;
  for (const char c : piece) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte_token_[byte] == kNone) continue;
    const bool fused = is_unknown_[byte] && previous_unknown && fuse_unknown_;
    if (!fused) ids.push_back(byte_token_[byte]);
    previous_unknown = is_unknown_[byte];
  }
  apply_merges(merges_, ids, scratch);
}

std::optional<int32_t> BpeModel::byte_token(unsigned char byte) const {
  return byte_token_[byte] == kNone ? std::nullopt : std::optional(byte_token_[byte]);
}

int64_t BpeModel::count_left_out(std::string_view text) const {
  return std::count_if(text.begin(), text.end(),
                       [&](char c) { return byte_token_[static_cast<unsigned char>(c)] == kNone; });
}

std::optional<int32_t> BpeModel::token_id(std::string_view spelling) const {
  const auto entry = id_of_.find(spelling);
  if (entry == id_of_.end()) return std::nullopt;
  return entry->second;
}

}  // namespace longhalo

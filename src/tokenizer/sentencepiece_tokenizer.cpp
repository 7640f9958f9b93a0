#include "tokenizer/sentencepiece_tokenizer.hpp"

#include <sentencepiece_processor.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "core/error.hpp"
#include "core/text.hpp"
#include "tokenizer/added_tokens.hpp"
#include "tokenizer/json_cursor.hpp"
#include "tokenizer/sentencepiece_spec.hpp"
#include "tokenizer/word_cache.hpp"

namespace longhalo {
namespace {

constexpr const char* kFetchAgain = "fetch the file again from where the model came from";
constexpr std::string_view kSpace = "\u2581";  // what the library writes for a space
constexpr std::string_view kMark = "\x01";     // encoded before a text to keep its start from being one
constexpr size_t kReportEvery_bytes = size_t{1} << 18;
constexpr int64_t kLargestId = int64_t{1} << 24;

AddedToken read_token(const JsonCursor& entry, int64_t id) {
  if (entry.boolean_or("single_word", false)) entry["single_word"].unsupported("single_word here");
  AddedToken token;
  token.id = static_cast<int32_t>(id);
  token.content = entry["content"].string();
  token.special = entry.boolean_or("special", false);
  token.left_strip = entry.boolean_or("lstrip", false);
  token.right_strip = entry.boolean_or("rstrip", false);
  return token;
}

/// The added tokens that the files beside the model name; those of the model itself too.
std::vector<AddedToken> read_added_tokens(const std::filesystem::path& directory) {
  std::vector<AddedToken> tokens;
  const auto checked_id = [](const JsonCursor& at, int64_t id) {
    if (id < 0 || id >= kLargestId)
      at.fail(text("a token id is a whole number below ", kLargestId), kFetchAgain);
    return id;
  };
  const auto config_file = directory / "tokenizer_config.json";
  if (std::filesystem::exists(config_file)) {
    const nlohmann::json config = read_json_file(config_file);
    if (const auto added = JsonCursor(config, config_file.string()).find("added_tokens_decoder")) {
      for (const auto& [key, unused] : added->object().items()) {
        const bool digits =
            !key.empty() && key.size() < 10 && key.find_first_not_of("0123456789") == std::string::npos;
        const JsonCursor entry = (*added)[key];
        tokens.push_back(read_token(entry, checked_id(entry, digits ? std::stoll(key) : -1)));
      }
      return tokens;
    }
  }
  const auto added_file = directory / "added_tokens.json";
  if (std::filesystem::exists(added_file)) {
    const nlohmann::json added = read_json_file(added_file);
    const JsonCursor cursor(added, added_file.string());
    for (const auto& [content, unused] : cursor.object().items()) {
      AddedToken token;
      token.content = content;
      token.id = static_cast<int32_t>(checked_id(cursor[content], cursor[content].integer()));
      token.special = true;
      tokens.push_back(std::move(token));
    }
  }
  return tokens;
}

/// The first place at or after `from` where a space follows another character; the text's end if there is
/// none.
size_t end_of_words(std::string_view text, size_t from) {
  for (size_t at = text.find(' ', from); at != std::string_view::npos; at = text.find(' ', at + 1)) {
    const std::string_view before = text.substr(0, at);
    if (at > 0 && before.back() != ' ' && !before.ends_with(kSpace)) return at;
  }
  return text.size();
}

class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const std::filesystem::path& file) : file_(file.string()) {
    const std::string model = read_whole_file(file);
    load(model);
    added_ = std::make_unique<AddedTokens>(collect_added_tokens(file.parent_path()), nullptr);
    spec_ = read_sentencepiece_spec(model);
    read_config(file.parent_path() / "tokenizer_config.json");
    by_words_ = words_are_independent();
  }

  std::vector<int32_t> encode(std::string_view text, SpecialTokens mode,
                              const EncodeProgress& progress) const override;
  std::string decode(std::span<const int32_t> ids) const override;
  int64_t text_bytes(int32_t id) const override;
  int64_t vocabulary_size() const override { return vocabulary_size_; }
  std::optional<int32_t> token_id(std::string_view token) const override;
  const std::vector<int32_t>& prefix() const override { return prefix_; }
  const std::vector<int32_t>& suffix() const override { return suffix_; }

 private:
  void load(const std::string& model);
  std::vector<AddedToken> collect_added_tokens(const std::filesystem::path& directory);
  void read_config(const std::filesystem::path& config_file);
  void check_mark(const JsonCursor& config) const;
  bool words_are_independent() const;
  std::vector<int> encode_by_library(std::string_view text) const;
  void encode_continuation(std::string_view text, std::vector<int32_t>& ids) const;
  void encode_words(std::string_view text, bool is_start, WordCache& words, std::vector<int32_t>& ids) const;
  void decode_plain(std::vector<int>& ids, std::string& bytes) const;

  std::string file_;
  sentencepiece::SentencePieceProcessor processor_;
  std::unique_ptr<AddedTokens> added_;
  std::unordered_map<int32_t, std::string> content_of_;  // of added and control tokens
  std::vector<int32_t> prefix_;
  std::vector<int32_t> suffix_;
  int64_t vocabulary_size_ = 0;
  SentencePieceSpec spec_;
  bool by_words_ = false;
  bool space_after_special_ = true;

  mutable std::mutex caches_mutex_;
  mutable std::vector<std::unique_ptr<WordCache>> idle_caches_;
};

void SentencePieceTokenizer::load(const std::string& model) {
  const auto refuse = [&](const std::string& what) {
    throw UserError(longhalo::text("the file is not a SentencePiece model: ", what), file_, kFetchAgain);
  };
  try {
    const auto status = processor_.LoadFromSerializedProto(model);
    if (!status.ok()) refuse(status.ToString());
  } catch (const UserError&) {
    throw;
  } catch (const std::exception& error) {  // what the library stands on throws where the library does not
    refuse(error.what());
  }
}

std::vector<AddedToken> SentencePieceTokenizer::collect_added_tokens(const std::filesystem::path& directory) {
  const int pieces = processor_.GetPieceSize();
  vocabulary_size_ = pieces;
  std::vector<AddedToken> tokens;
  const auto add = [&](AddedToken token) {
    if (token.content.empty()) return;
    const bool is_new =
        std::none_of(tokens.begin(), tokens.end(), [&](auto& t) { return t.content == token.content; });
    if (!is_new) return;
    if (!content_of_.emplace(token.id, token.content).second) {
      throw UserError(longhalo::text("the id ", token.id, " is used by two added tokens"), directory.string(),
                      kFetchAgain);
    }
    vocabulary_size_ = std::max<int64_t>(vocabulary_size_, token.id + int64_t{1});
    tokens.push_back(std::move(token));
  };
  for (AddedToken& token : read_added_tokens(directory)) {
    if (token.id < pieces && processor_.IdToPiece(token.id) != token.content) {
      throw UserError(longhalo::text("the added token \"", token.content, "\" has the id ", token.id,
                                     ", which is \"", processor_.IdToPiece(token.id), "\" in the model"),
                      file_, kFetchAgain);
    }
    add(std::move(token));
  }
  for (int id = 0; id < pieces; ++id) {
    if (!processor_.IsControl(id)) continue;
    AddedToken token;
    token.id = id;
    token.content = processor_.IdToPiece(id);
    token.special = true;
    add(std::move(token));
  }
  return tokens;
}

/// Llama's convention: begin of text before, nothing after, unless tokenizer_config.json says otherwise.
void SentencePieceTokenizer::read_config(const std::filesystem::path& config_file) {
  const nlohmann::json content =
      std::filesystem::exists(config_file) ? read_json_file(config_file) : nlohmann::json::object();
  const JsonCursor config(content, config_file.string());
  if (config.boolean_or("add_bos_token", true) && processor_.bos_id() >= 0)
    prefix_.push_back(processor_.bos_id());
  if (config.boolean_or("add_eos_token", false) && processor_.eos_id() >= 0)
    suffix_.push_back(processor_.eos_id());
  space_after_special_ = config.boolean_or("legacy", true) || !spec_.add_dummy_prefix;
  if (!space_after_special_) check_mark(config["legacy"]);
}

/// encode_continuation() needs a character that is a token of its own and joins with nothing.
void SentencePieceTokenizer::check_mark(const JsonCursor& legacy) const {
  const std::vector<int> mark_ids = encode_by_library(kMark);
  bool joins = spec_.rewrites_characters || mark_ids.empty() || mark_ids.back() == processor_.unk_id();
  for (int id = 0; id < processor_.GetPieceSize(); ++id) {
    const std::string& piece = processor_.IdToPiece(id);
    joins = joins || (piece.size() > 1 && piece.find(kMark) != std::string::npos);
  }
  if (joins)
    legacy.unsupported("\"legacy\": false with a model without byte fallback or with a character map");
}

/// Whether a BPE text may be cut before every space that follows another character. The model sees a space as
/// the character U+2581; if no piece holds one after another character, no merge crosses such a cut, so each
/// word merges as it would inside the text. (Unigram scores are sums along the whole text, whose rounding
/// decides ties: there the text stays whole.)
bool SentencePieceTokenizer::words_are_independent() const {
  if (!spec_.is_bpe || spec_.whitespace_as_suffix || spec_.rewrites_characters ||
      spec_.remove_extra_whitespaces || !spec_.escape_whitespaces || token_id(kSpace) == std::nullopt) {
    return false;
  }
  for (int id = 0; id < processor_.GetPieceSize(); ++id) {
    std::string_view piece = processor_.IdToPiece(id);
    while (piece.starts_with(kSpace))
      piece.remove_prefix(kSpace.size());
    if (piece.find(kSpace) != std::string_view::npos) return false;
  }
  return true;
}

std::vector<int32_t> SentencePieceTokenizer::encode(std::string_view text, SpecialTokens mode,
                                                    const EncodeProgress& progress) const {
  std::unique_ptr<WordCache> words;
  if (by_words_) {
    const std::lock_guard lock(caches_mutex_);
    if (!idle_caches_.empty()) {
      words = std::move(idle_caches_.back());
      idle_caches_.pop_back();
    }
  }
  if (by_words_ && !words) words = std::make_unique<WordCache>();

  // Names of tokens are matched byte by byte, so text that is not valid UTF-8 does no harm here.
  std::vector<int32_t> ids;
  const auto report = [&](size_t done) {
    if (progress) progress(static_cast<int64_t>(done), static_cast<int64_t>(text.size()));
  };
  for (const AddedTokens::Part& part : added_->split(text, mode)) {
    const std::string_view part_text = text.substr(part.begin, part.end - part.begin);
    if (part.token != nullptr) {
      ids.push_back(part.token->id);
    } else if (part.begin > 0 && !space_after_special_) {
      encode_continuation(part_text, ids);
    } else if (!by_words_) {
      const std::vector<int> encoded = encode_by_library(part_text);
      ids.insert(ids.end(), encoded.begin(), encoded.end());
    } else {
      for (size_t at = 0; at < part_text.size();) {
        const size_t end = end_of_words(part_text, at + kReportEvery_bytes);
        encode_words(part_text.substr(at, end - at), at == 0, *words, ids);
        at = end;
        report(part.begin + at);
      }
    }
  }
  report(text.size());
  if (words) {
    const std::lock_guard lock(caches_mutex_);
    idle_caches_.push_back(std::move(words));
  }
  return ids;
}

/// `text` starts a text if `is_start`, else it starts with the space of its first word.
void SentencePieceTokenizer::encode_words(std::string_view text, bool is_start, WordCache& words,
                                          std::vector<int32_t>& ids) const {
  for (size_t at = 0; at < text.size();) {
    const size_t end = end_of_words(text, at + 1);
    std::string_view word = text.substr(at, end - at);
    const bool has_own_space = !(is_start && at == 0);
    at = end;
    // The library puts a space before whatever it is given: it stands for the one taken off here.
    if (has_own_space && spec_.add_dummy_prefix) word.remove_prefix(1);
    if (word.empty()) {  // the library makes nothing of an empty text
      ids.push_back(*token_id(kSpace));
      continue;
    }
    const bool cached = word.size() <= WordCache::kLongestWord_bytes;
    if (const auto known = cached ? words.find(word) : std::nullopt) {
      ids.insert(ids.end(), known->begin(), known->end());
      continue;
    }
    const std::vector<int> encoded = encode_by_library(word);
    if (cached) words.insert(word, encoded);
    ids.insert(ids.end(), encoded.begin(), encoded.end());
  }
}

/// A text that goes on after a special token, without the space that the library puts before a text.
void SentencePieceTokenizer::encode_continuation(std::string_view text, std::vector<int32_t>& ids) const {
  std::string marked(kMark);
  marked += text;
  const std::vector<int> encoded = encode_by_library(marked);
  const auto mark_ids = static_cast<ptrdiff_t>(encode_by_library(kMark).size());
  ids.insert(ids.end(), encoded.begin() + mark_ids, encoded.end());
}

std::vector<int> SentencePieceTokenizer::encode_by_library(std::string_view text) const {
  std::vector<int> encoded;
  const auto status = processor_.Encode(text, &encoded);
  if (!status.ok()) {
    throw UserError(longhalo::text("SentencePiece could not encode the text: ", status.ToString()), file_,
                    "check that the model file is whole");
  }
  return encoded;
}

void SentencePieceTokenizer::decode_plain(std::vector<int>& ids, std::string& bytes) const {
  if (ids.empty()) return;
  std::string decoded;
  const auto status = processor_.Decode(ids, &decoded);
  if (!status.ok()) {
    throw UserError(longhalo::text("SentencePiece could not decode ids: ", status.ToString()), file_,
                    "decode with the tokenizer that the ids were made with");
  }
  bytes += decoded;
  ids.clear();
}

std::string SentencePieceTokenizer::decode(std::span<const int32_t> ids) const {
  std::string bytes;
  std::vector<int> plain;
  for (const int32_t id : ids) {
    const auto added = content_of_.find(id);
    if (added != content_of_.end()) {
      decode_plain(plain, bytes);
      bytes += added->second;
    } else if (id >= 0 && id < processor_.GetPieceSize()) {
      plain.push_back(id);
    } else {
      throw UserError(
          longhalo::text("the id ", id, " is no token (ids go from 0 to ", vocabulary_size_ - 1, ")"), file_,
          "decode with the tokenizer that the ids were made with");
    }
  }
  decode_plain(plain, bytes);
  return bytes;
}

int64_t SentencePieceTokenizer::text_bytes(int32_t id) const {
  const auto added = std::find_if(added_->tokens().begin(), added_->tokens().end(),
                                  [id](const AddedToken& token) { return token.id == id; });
  if (added != added_->tokens().end())
    return added->special ? 0 : static_cast<int64_t>(added->content.size());
  if (id < 0 || id >= processor_.GetPieceSize() || processor_.IsUnused(id)) return 0;
  if (processor_.IsByte(id)) return 1;
  const std::string_view piece = processor_.IdToPiece(id);
  auto bytes = static_cast<int64_t>(piece.size());
  for (size_t at = piece.find(kSpace); at != std::string_view::npos;
       at = piece.find(kSpace, at + kSpace.size()))
    bytes -= static_cast<int64_t>(kSpace.size()) - 1;
  return bytes;
}

std::optional<int32_t> SentencePieceTokenizer::token_id(std::string_view token) const {
  for (const AddedToken& added : added_->tokens()) {
    if (added.content == token) return added.id;
  }
  const int id = processor_.PieceToId(token);
  if (processor_.IdToPiece(id) != token) return std::nullopt;  // the library answers the unknown token
  return id;
}

}  // namespace

std::unique_ptr<Tokenizer> load_sentencepiece_tokenizer(const std::filesystem::path& tokenizer_model) {
  return std::make_unique<SentencePieceTokenizer>(tokenizer_model);
}

}  // namespace longhalo

#include "tokenizer/bpe_tokenizer.hpp"

#include <algorithm>
#include <mutex>
#include <unordered_set>

#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "tokenizer/added_tokens.hpp"
#include "tokenizer/bpe_description.hpp"
#include "tokenizer/bpe_model.hpp"
#include "tokenizer/normalizer.hpp"
#include "tokenizer/pretokenizer.hpp"
#include "tokenizer/utf8.hpp"
#include "tokenizer/word_cache.hpp"

namespace longhalo {
namespace {

/// What one encode() needs for itself. Kept between calls, so that the words of a document serve the next one
/// too.
struct Workspace {
  MatchScratch match;
  MergeScratch merge;
  WordCache words;
  std::vector<int32_t> piece_ids;
};

/// Property Word as `single_word` means it.
std::function<bool(uint32_t)> word_character_test() {
  const Pattern word = Pattern::word_character();
  return [word](uint32_t code_point) {
    MatchScratch scratch;  // made anew: single_word tokens are rare
    std::string character;
    append_utf8(character, code_point);
    ByteRange match;
    return word.find(character, 0, scratch, match);
  };
}

std::vector<AddedToken> with_normalized_flag(const std::vector<AddedToken>& tokens, bool normalized,
                                             Normalization normalization) {
  std::vector<AddedToken> chosen;
  for (AddedToken token : tokens) {
    if (token.normalized != normalized) continue;
    if (normalized && normalization == Normalization::kNfc) token.content = nfc(token.content);
    chosen.push_back(std::move(token));
  }
  return chosen;
}

class BpeTokenizer final : public Tokenizer {
 public:
  explicit BpeTokenizer(const JsonCursor& description)
      : file_(description.where()),
        normalization_(read_normalization(description)),
        pre_tokenizer_(description["pre_tokenizer"]),
        model_(description["model"]),
        added_(read_added_tokens(description, model_)),
        raw_added_(with_normalized_flag(added_, false, normalization_), word_character_test()),
        normalized_added_(with_normalized_flag(added_, true, normalization_), word_character_test()),
        affixes_(read_affixes(description)) {
    vocabulary_size_ = model_.size();
    for (const AddedToken& token : added_) {
      added_id_of_.emplace(token.content, token.id);
      if (token.special) special_ids_.insert(token.id);
      vocabulary_size_ = std::max<int64_t>(vocabulary_size_, token.id + int64_t{1});
    }
    for (const AddedTokens* group : {&raw_added_, &normalized_added_}) {
      for (const AddedToken& token : group->tokens())
        added_content_of_.emplace(token.id, token.content);
    }
  }

  std::vector<int32_t> encode(std::string_view text, SpecialTokens mode,
                              const EncodeProgress& progress) const override;
  std::string decode(std::span<const int32_t> ids) const override;
  int64_t text_bytes(int32_t id) const override;
  int64_t vocabulary_size() const override { return vocabulary_size_; }
  std::optional<int32_t> token_id(std::string_view token) const override;
  const std::vector<int32_t>& prefix() const override { return affixes_.prefix; }
  const std::vector<int32_t>& suffix() const override { return affixes_.suffix; }

 private:
  class Encoding;

  std::unique_ptr<Workspace> borrow_workspace() const;
  void return_workspace(std::unique_ptr<Workspace> workspace) const;

  std::string file_;
  Normalization normalization_;
  PreTokenizer pre_tokenizer_;
  BpeModel model_;
  std::vector<AddedToken> added_;
  AddedTokens raw_added_;
  AddedTokens normalized_added_;
  Affixes affixes_;
  StringMap<int32_t> added_id_of_;
  std::unordered_map<int32_t, std::string> added_content_of_;  // normalised where the token is
  std::unordered_set<int32_t> special_ids_;
  int64_t vocabulary_size_ = 0;

  mutable std::mutex workspaces_mutex_;
  mutable std::vector<std::unique_ptr<Workspace>> idle_workspaces_;
};

/// One text on its way to ids.
class BpeTokenizer::Encoding final : public PieceSink {
 public:
  Encoding(const BpeTokenizer& owner, SpecialTokens mode, Workspace& workspace,
           const EncodeProgress& progress, size_t total_bytes)
      : owner_(owner), mode_(mode), workspace_(workspace), progress_(progress), total_bytes_(total_bytes) {
    constexpr size_t kUsualBytesPerToken = 4;
    ids_.reserve(total_bytes / kUsualBytesPerToken + 1);
  }

  std::vector<int32_t> run(std::string_view text) {
    while (done_bytes_ < text.size()) {
      const size_t valid = valid_utf8_prefix(text.substr(done_bytes_));
      if (valid > 0) {
        valid_text(text.substr(done_bytes_, valid));
      } else {
        const auto byte = static_cast<unsigned char>(text[done_bytes_++]);
        if (const auto id = owner_.model_.byte_token(byte)) ids_.push_back(*id);
      }
    }
    if (progress_) progress_(static_cast<int64_t>(total_bytes_), static_cast<int64_t>(total_bytes_));
    return std::move(ids_);
  }

  void piece(std::string_view bytes) override {
    if (bytes.size() > WordCache::kLongestWord_bytes) {
      owner_.model_.encode_piece(bytes, workspace_.piece_ids, workspace_.merge);
      append(workspace_.piece_ids);
    } else if (const auto known = workspace_.words.find(bytes)) {
      append(*known);
    } else {
      owner_.model_.encode_piece(bytes, workspace_.piece_ids, workspace_.merge);
      workspace_.words.insert(bytes, workspace_.piece_ids);
      append(workspace_.piece_ids);
    }
    piece_bytes_ += bytes.size();
    if (piece_bytes_ >= kReportEvery_bytes) report();
  }

 private:
  static constexpr size_t kReportEvery_bytes = size_t{1} << 18;

  void append(std::span<const int32_t> ids) { ids_.insert(ids_.end(), ids.begin(), ids.end()); }

  /// Normalisation changes lengths, so progress inside a stretch is an estimate that never passes its end.
  void report() {
    stretch_bytes_done_ = std::min(stretch_bytes_done_ + piece_bytes_, stretch_bytes_);
    piece_bytes_ = 0;
    if (progress_) {
      progress_(static_cast<int64_t>(done_bytes_ + stretch_bytes_done_), static_cast<int64_t>(total_bytes_));
    }
  }

  void valid_text(std::string_view text) {
    stretch_bytes_ = text.size();
    stretch_bytes_done_ = 0;
    for (const AddedTokens::Part& part : owner_.raw_added_.split(text, mode_)) {
      const std::string_view part_text = text.substr(part.begin, part.end - part.begin);
      if (part.token != nullptr) {
        ids_.push_back(part.token->id);
      } else if (owner_.normalization_ == Normalization::kNfc) {
        normalized_text(nfc(part_text));
      } else {
        normalized_text(part_text);
      }
    }
    done_bytes_ += text.size();
  }

  void normalized_text(std::string_view text) {
    for (const AddedTokens::Part& part : owner_.normalized_added_.split(text, mode_)) {
      if (part.token != nullptr) {
        ids_.push_back(part.token->id);
      } else {
        owner_.pre_tokenizer_.cut(text.substr(part.begin, part.end - part.begin), workspace_.match, *this);
      }
    }
  }

  const BpeTokenizer& owner_;
  SpecialTokens mode_;
  Workspace& workspace_;
  const EncodeProgress& progress_;
  size_t total_bytes_;
  size_t done_bytes_ = 0;          // of the text, up to the stretch at hand
  size_t stretch_bytes_ = 0;       // of the stretch at hand
  size_t stretch_bytes_done_ = 0;  // as last reported
  size_t piece_bytes_ = 0;         // since then
  std::vector<int32_t> ids_;
};

std::vector<int32_t> BpeTokenizer::encode(std::string_view text, SpecialTokens mode,
                                          const EncodeProgress& progress) const {
  auto workspace = borrow_workspace();
  auto ids = Encoding(*this, mode, *workspace, progress, text.size()).run(text);
  return_workspace(std::move(workspace));
  if (const int64_t left_out = model_.count_left_out(text); left_out > 0) {
    log_warning(
        longhalo::text(file_, " has no token for ", left_out, " of the ", text.size(),
                       " bytes of this text (rare control characters or damaged text); they are left out"));
  }
  return ids;
}

std::string BpeTokenizer::decode(std::span<const int32_t> ids) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (const auto added = added_content_of_.find(id); added != added_content_of_.end()) {
      bytes += added->second;
    } else if (id >= 0 && id < model_.size() && model_.bytes_of(id)) {
      bytes += *model_.bytes_of(id);
    } else {
      throw UserError(
          longhalo::text("the id ", id, " is no token (ids go from 0 to ", vocabulary_size_ - 1, ")"), file_,
          "decode with the tokenizer that the ids were made with");
    }
  }
  return bytes;
}

int64_t BpeTokenizer::text_bytes(int32_t id) const {
  if (special_ids_.contains(id)) return 0;
  if (const auto added = added_content_of_.find(id); added != added_content_of_.end())
    return static_cast<int64_t>(added->second.size());
  const bool has_bytes = id >= 0 && id < model_.size() && model_.bytes_of(id);
  return has_bytes ? static_cast<int64_t>(model_.bytes_of(id)->size()) : 0;
}

std::optional<int32_t> BpeTokenizer::token_id(std::string_view token) const {
  const auto added = added_id_of_.find(token);
  return added != added_id_of_.end() ? std::optional(added->second) : model_.token_id(token);
}

std::unique_ptr<Workspace> BpeTokenizer::borrow_workspace() const {
  const std::lock_guard lock(workspaces_mutex_);
  if (idle_workspaces_.empty()) return std::make_unique<Workspace>();
  auto workspace = std::move(idle_workspaces_.back());
  idle_workspaces_.pop_back();
  return workspace;
}

void BpeTokenizer::return_workspace(std::unique_ptr<Workspace> workspace) const {
  constexpr size_t kMostSymbolsKept = size_t{1} << 16;
  if (workspace->merge.symbols.capacity() >
      kMostSymbolsKept) {  // one giant piece should not hold memory for ever
    workspace->merge = {};
    workspace->piece_ids = {};
  }
  const std::lock_guard lock(workspaces_mutex_);
  idle_workspaces_.push_back(std::move(workspace));
}

}  // namespace

std::unique_ptr<Tokenizer> load_bpe_tokenizer(const std::filesystem::path& tokenizer_json) {
  const nlohmann::json content = read_json_file(tokenizer_json);
  const JsonCursor description(content, tokenizer_json.string());
  check_top_level(description);
  return std::make_unique<BpeTokenizer>(description);
}

}  // namespace longhalo

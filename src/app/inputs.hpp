// What a job reads: documents as token sequences, and the prompts asked of each. Lives on rank 0.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config/config.hpp"
#include "dataset/token_file.hpp"
#include "telemetry/progress.hpp"
#include "tokenizer/chat_template.hpp"
#include "tokenizer/tokenizer.hpp"

namespace longhalo {

/// One document made ready: [opening of the template | document], then one continuation a prompt.
struct Sequence {
  std::vector<int32_t> tokens;
  int64_t document_begin = 0;   // tokens before it belong to the chat template (or are the model's prefix)
  int64_t document_bytes = 0;   // 0 when the document came as tokens
  int64_t predicted_bytes = 0;  // without its first token's where nothing stands before that
  std::vector<std::vector<int32_t>> prompts;  // what follows the document, up to where the answer begins
};

/// Ids mean other words to another tokenizer: throws UserError unless the token file was made with the one of
/// this model directory, or does not say.
void refuse_other_tokenizer(const TokenFile& tokens, const std::string& file,
                            const std::filesystem::path& model_directory);

class Inputs {
 public:
  /// Reads tokenizer, chat template and prompts and looks at every document once, so that a fault is known
  /// before any work begins. Throws UserError. `vocabulary` is the model's.
  Inputs(const Config& config, int64_t vocabulary);

  int64_t documents() const { return static_cast<int64_t>(names_.size()); }
  const std::string& document_name(int64_t index) const { return names_[static_cast<size_t>(index)]; }
  /// Name and prompts as they read back from records, which are told apart by them: one each, and no other's.
  const std::string& document_key(int64_t index) const { return document_keys_[static_cast<size_t>(index)]; }
  const std::vector<std::string>& prompt_keys() const { return prompt_keys_; }
  /// Tells one content of a document, with what the template puts before it, from another.
  std::string fingerprint(int64_t index) const;

  /// Tokenises document `index`, with progress. Throws UserError for a token id beyond the model's
  /// vocabulary.
  Sequence sequence(int64_t index, const ProgressOptions& progress) const;

  /// The opening and the first documents' beginnings, each as long as the others: `tokens` in all at most.
  /// Throws UserError as sequence() does.
  std::vector<int32_t> beginnings(int64_t tokens) const;

  std::string decode(std::span<const int32_t> tokens) const { return tokenizer_->decode(tokens); }

 private:
  void read_token_file(const std::string& file);
  void check_ids(const std::vector<int32_t>& tokens, const std::string& where) const;
  void read_prompts_of(const Config::Input& input);
  void place_prompts(const Config& config);
  std::vector<int32_t> document_tokens(int64_t index, int64_t& bytes, const ProgressOptions& progress) const;
  int64_t first_bytes(int32_t first_token) const;

  int64_t vocabulary_;
  std::vector<std::string> names_, document_keys_;
  std::vector<std::string> digests_;       // SHA-256 of each document's text or tokens
  std::unique_ptr<TokenFile> token_file_;  // null: the names are text files
  std::unique_ptr<Tokenizer> tokenizer_;   // null: documents are tokens and nothing is generated
  std::vector<std::string> prompts_, prompt_keys_;
  std::vector<int32_t> opening_;                     // before the document
  std::vector<std::vector<int32_t>> continuations_;  // after it, by prompt
};

}  // namespace longhalo

#include "app/training_data.hpp"

#include <algorithm>

#include "app/model_setup.hpp"
#include "core/text.hpp"
#include "dataset/documents.hpp"
#include "storage/sha256.hpp"
#include "tokenizer/tokenizer.hpp"

namespace longhalo {
namespace {

// Each document as its model reads it: with what stands before and after a text.
std::vector<std::vector<int32_t>> tokenise(const Config& config, int64_t vocabulary,
                                           const ProgressOptions& options) {
  const std::unique_ptr<Tokenizer> tokenizer = Tokenizer::load(config.model.path);
  if (tokenizer->vocabulary_size() > vocabulary)
    throw UserError(
        text("the tokenizer has ", tokenizer->vocabulary_size(), " tokens, the model ", vocabulary),
        config.model.path, "use a tokenizer that belongs to the model, or a model with more tokens");
  std::vector<std::vector<int32_t>> documents;
  Progress progress("tokenising", static_cast<int64_t>(config.input.documents.size()), ProgressUnit::kItems,
                    options);
  for (const std::string& name : config.input.documents) {
    std::vector<int32_t>& tokens = documents.emplace_back(tokenizer->prefix());
    const std::vector<int32_t> inner = tokenizer->encode(read_document(name).text, SpecialTokens::kAsText);
    tokens.insert(tokens.end(), inner.begin(), inner.end());
    tokens.insert(tokens.end(), tokenizer->suffix().begin(), tokenizer->suffix().end());
    progress.add(1);
  }
  return documents;
}

std::vector<std::vector<int32_t>> shared(const MpiSession& session,
                                         std::vector<std::vector<int32_t>> documents) {
  documents.resize(static_cast<size_t>(broadcast_count(session, static_cast<int64_t>(documents.size()))));
  for (std::vector<int32_t>& tokens : documents) {
    tokens.resize(static_cast<size_t>(broadcast_count(session, static_cast<int64_t>(tokens.size()))));
    broadcast_bytes(session, tokens.data(), static_cast<int64_t>(tokens.size() * sizeof(int32_t)), 0);
  }
  return documents;
}

// Of the sizes of all documents and the first tokens; all tokens of a large file would take as long as
// reading it.
std::string fingerprint_of(const DocumentTokens& documents) {
  constexpr int64_t kMostTokens = int64_t{1} << 24;
  Sha256 digest;
  std::vector<int32_t> tokens;
  int64_t left = kMostTokens;
  for (int64_t i = 0; i < documents.documents(); ++i) {
    const int64_t size = documents.document_tokens(i);
    digest.update(std::as_bytes(std::span(&size, 1)));
    tokens.resize(static_cast<size_t>(std::min(size, left)));
    if (tokens.empty()) continue;
    documents.read(i, 0, tokens);
    digest.update(std::as_bytes(std::span(tokens)));
    left -= static_cast<int64_t>(tokens.size());
  }
  return digest.hex().substr(0, 16);
}

}  // namespace

TrainingData::TrainingData(const MpiSession& session, const Config& config, int64_t vocabulary) {
  const bool from_file = !config.input.tokens.empty();
  std::vector<std::vector<int32_t>> texts;
  session.together([&] {
    if (from_file) {
      file_ = std::make_unique<TokenFile>(config.input.tokens);
      if (file_->info().vocabulary_size > vocabulary)
        throw UserError(text("the tokens are of a vocabulary of ", file_->info().vocabulary_size,
                             ", the model's has ", vocabulary),
                        config.input.tokens, "make the file with the tokenizer that belongs to the model");
      documents_ = documents_of(*file_);
    } else if (session.is_root()) {
      texts = tokenise(config, vocabulary, progress_options(session, config));
    }
  });
  if (!from_file) documents_ = documents_of(shared(session, std::move(texts)));

  session.together([&] {
    if (session.is_root()) fingerprint_ = fingerprint_of(*documents_);
  });
  fingerprint_ = broadcast_text(session, fingerprint_);

  const std::string origin = from_file ? config.input.tokens : "input.documents";
  const Config::Train& train = config.train;
  session.together([&] {
    split_ = split_tokens(*documents_, train.validation_share);
    training_ = std::make_unique<PackedSequences>(*documents_, split_.training, train.sequence_tokens,
                                                  PackedSequences::Order::kShuffled,
                                                  static_cast<uint64_t>(train.seed), origin);
    if (train.validation_share == 0) return;
    validation_ = std::make_unique<PackedSequences>(*documents_, split_.validation, train.sequence_tokens,
                                                    PackedSequences::Order::kAsStored, 0,
                                                    text(origin, ", train.validation_share"));
    validation_sequences_ = std::min(train.validation_sequences, validation_->sequences_an_epoch());
  });
}

}  // namespace longhalo

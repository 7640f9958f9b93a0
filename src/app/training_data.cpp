#include "app/training_data.hpp"

#include <algorithm>
#include <filesystem>

#include "app/inputs.hpp"
#include "app/model_setup.hpp"
#include "comm/alike.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "dataset/documents.hpp"
#include "storage/sha256.hpp"
#include "tokenizer/tokenizer.hpp"

namespace longhalo {
namespace {

std::vector<std::vector<int32_t>> tokenise(const Config& config, const Tokenizer& tokenizer,
                                           const ProgressOptions& options) {
  std::vector<std::vector<int32_t>> documents;
  Progress progress("tokenising", static_cast<int64_t>(config.input.documents.size()),
                    ProgressUnit::kDocuments, options);
  for (const std::string& name : config.input.documents) {
    documents.push_back(tokenizer.encode(read_document(name).text, SpecialTokens::kAsText));
    progress.add(1);
  }
  return documents;
}

std::unique_ptr<Tokenizer> load_tokenizer(const Config& config, int64_t vocabulary) {
  std::unique_ptr<Tokenizer> tokenizer = Tokenizer::load(config.model.path);
  if (tokenizer->vocabulary_size() > vocabulary)
    throw UserError(
        text("the tokenizer has ", tokenizer->vocabulary_size(), " tokens, the model ", vocabulary),
        config.model.path, "use a tokenizer that belongs to the model, or a model with more tokens");
  return tokenizer;
}

// A token file needs no tokenizer, but one of a model that has one has to be that one.
std::unique_ptr<Tokenizer> tokenizer_of_tokens(const Config& config, const TokenFile& file,
                                               int64_t vocabulary) {
  if (config.model.path.empty() || !std::filesystem::exists(tokenizer_file(config.model.path)))
    return nullptr;
  refuse_other_tokenizer(file, config.input.tokens, config.model.path);
  return load_tokenizer(config, vocabulary);
}

void share(const MpiSession& session, std::vector<int32_t>& values) {
  values.resize(static_cast<size_t>(broadcast_count(session, static_cast<int64_t>(values.size()))));
  broadcast_bytes(session, values.data(), static_cast<int64_t>(values.size() * sizeof(int32_t)), 0);
}

std::vector<std::vector<int32_t>> shared(const MpiSession& session,
                                         std::vector<std::vector<int32_t>> documents) {
  documents.resize(static_cast<size_t>(broadcast_count(session, static_cast<int64_t>(documents.size()))));
  for (std::vector<int32_t>& tokens : documents)
    share(session, tokens);
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

bool has_labels(PackedSequences& part, int64_t sequences) {
  for (int64_t i = 0; i < sequences; ++i) {
    const std::vector<int32_t> labels = part.sequence(i).labels;
    if (std::any_of(labels.begin(), labels.end(), [](int32_t label) { return label != kNoLabel; }))
      return true;
  }
  return false;
}

// The root makes tokens of all texts while the others wait.
double slow_tokenising_seconds(const Config& config) {
  constexpr double kSlow = 0.5e6;  // bytes a second
  double bytes = 0;
  for (const std::string& name : config.input.documents) {
    std::error_code error;
    const auto size = std::filesystem::file_size(name, error);
    if (!error) bytes += static_cast<double>(size);
  }
  return bytes / kSlow;
}

}  // namespace

TrainingData::TrainingData(const MpiSession& session, const Config& config, int64_t vocabulary) {
  const bool from_file = !config.input.tokens.empty();
  std::vector<std::vector<int32_t>> texts;
  std::vector<int32_t> prefix, suffix;
  const MorePatience for_the_root(slow_tokenising_seconds(config));
  session.together([&] {
    if (from_file) {
      file_ = std::make_unique<TokenFile>(config.input.tokens);
      if (file_->info().vocabulary_size > vocabulary)
        throw UserError(text("the tokens are of a vocabulary of ", file_->info().vocabulary_size,
                             ", the model's has ", vocabulary),
                        config.input.tokens, "make the file with the tokenizer that belongs to the model");
      documents_ = documents_of(*file_);
    }
    if (!session.is_root()) return;
    const std::unique_ptr<Tokenizer> tokenizer =
        from_file ? tokenizer_of_tokens(config, *file_, vocabulary) : load_tokenizer(config, vocabulary);
    if (!from_file) texts = tokenise(config, *tokenizer, progress_options(session, config));
    if (tokenizer == nullptr) return;
    prefix = tokenizer->prefix();
    suffix = tokenizer->suffix();
    for (int32_t id = 0; id < tokenizer->vocabulary_size(); ++id)
      token_bytes_.push_back(static_cast<int32_t>(tokenizer->text_bytes(id)));
  });
  if (!from_file) documents_ = documents_of(shared(session, std::move(texts)));
  for (std::vector<int32_t>* values : {&prefix, &suffix, &token_bytes_})
    share(session, *values);
  documents_ = with_affixes(std::move(documents_), std::move(prefix), std::move(suffix));
  session.together([&] { fingerprint_ = fingerprint_of(*documents_); });
  require_alike(session, "the fingerprint of the tokens", fingerprint_,
                from_file ? config.input.tokens : "input.documents",
                "give all hosts the same file: one that they share, or copies made anew from one place");

  const std::string origin = from_file ? config.input.tokens : "input.documents";
  const Config::Train& train = config.train;
  const Packing packing = train.packing == PackingSetting::kPacked ? Packing::kPacked : Packing::kOneDocument;
  session.together([&] {
    split_ = split_tokens(*documents_, train.validation_share);
    training_ = std::make_unique<PackedSequences>(*documents_, split_.training, train.sequence_tokens,
                                                  packing, PackedSequences::Order::kShuffled,
                                                  static_cast<uint64_t>(train.seed), origin);
    if (train.validation_share == 0) return;
    validation_ = std::make_unique<PackedSequences>(*documents_, split_.validation, train.sequence_tokens,
                                                    packing, PackedSequences::Order::kAsStored, 0,
                                                    text(origin, ", train.validation_share"));
    validation_sequences_ = std::min(train.validation_sequences, validation_->sequences_an_epoch());
    if (!has_labels(*validation_, validation_sequences_))
      throw UserError("the tokens to validate on are too few: none has one before it that would foretell it",
                      text(origin, ", train.validation_share"),
                      "give a larger train.validation_share, or 0 to train without validation");
  });
}

std::optional<int64_t> TrainingData::label_bytes(const PackedSequence& sequence) const {
  if (token_bytes_.empty()) return std::nullopt;
  int64_t bytes = 0;
  for (const int32_t label : sequence.labels)
    if (label != kNoLabel && label < static_cast<int32_t>(token_bytes_.size()))
      bytes += token_bytes_[static_cast<size_t>(label)];
  return bytes;
}

}  // namespace longhalo

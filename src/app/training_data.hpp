// What a training job reads: text files or a token file, packed into sequences to train on and, of the tokens
// at the end, sequences to validate on. Every rank reads the same ones.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/mpi_session.hpp"
#include "config/config.hpp"
#include "dataset/packed_sequences.hpp"
#include "dataset/token_file.hpp"

namespace longhalo {

class TrainingData {
 public:
  /// Text files are tokenised by rank 0; a token file is opened by every rank. Each document has before and
  /// after it what the tokenizer of model.path says. Throws UserError (on all ranks) for unreadable input, a
  /// token file of another tokenizer, ids beyond `vocabulary`, and too few tokens. Collective.
  TrainingData(const MpiSession& session, const Config& config, int64_t vocabulary);

  PackedSequences& training() { return *training_; }
  /// At most train.validation_sequences of them are there to be used; none where nothing is split off.
  int64_t validation_sequences() const { return validation_sequences_; }
  PackedSequences& validation() { return *validation_; }
  /// Bytes of text that the labels stand for; nothing where tokens have no known text, as in a token file
  /// without its tokenizer.
  std::optional<int64_t> label_bytes(const PackedSequence& sequence) const;
  /// Tells one input from another; the same on every rank.
  const std::string& fingerprint() const { return fingerprint_; }
  int64_t training_tokens() const { return split_.training.size(); }
  int64_t validation_tokens() const { return split_.validation.size(); }

 private:
  std::unique_ptr<TokenFile> file_;
  std::unique_ptr<DocumentTokens> documents_;
  std::vector<int32_t> token_bytes_;  // by id; empty where it is not known
  std::string fingerprint_;
  DataSplit split_;
  std::unique_ptr<PackedSequences> training_, validation_;
  int64_t validation_sequences_ = 0;
};

}  // namespace longhalo

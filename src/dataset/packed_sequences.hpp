// Documents made into sequences of one length, in an order that a seed shuffles. Sequence number k is a
// pure function of data, seed and k, so a job resumes at exactly the next one by knowing only its number.
//
// Packed: in every epoch the documents follow each other in a new order, as one stream; the stream is cut
// into sequences, which are then shuffled too (one document may fill many). What is left at the end of an
// epoch's stream, less than one sequence, is not used in that epoch. One document: a sequence holds tokens of
// one document only. A longer document is cut into several sequences, a shorter one is filled up with tokens
// that have no label and that nobody sees. A token's label is the token after it in its document; the last
// token of a document has none.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dataset/token_file.hpp"

namespace longhalo {

/// Half-open range of token positions over all documents, one after another.
struct TokenSpan {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

/// Documents as tokens, wherever they are.
class DocumentTokens {
 public:
  virtual ~DocumentTokens() = default;
  virtual int64_t documents() const = 0;
  virtual int64_t document_tokens(int64_t document) const = 0;
  /// Tokens [first, first + out.size()) of a document. Throws UserError.
  virtual void read(int64_t document, int64_t first, std::span<int32_t> out) const = 0;
};

std::unique_ptr<DocumentTokens> documents_of(std::vector<std::vector<int32_t>> documents);
/// `file` must outlive it.
std::unique_ptr<DocumentTokens> documents_of(const TokenFile& file);
/// The same with `prefix` before and `suffix` behind every document.
std::unique_ptr<DocumentTokens> with_affixes(std::unique_ptr<DocumentTokens> documents,
                                             std::vector<int32_t> prefix, std::vector<int32_t> suffix);

/// Where a token has no label: as the loss ignores it, and as PyTorch does.
inline constexpr int32_t kNoLabel = -100;

struct PackedSequence {
  /// Token 0 everywhere, without labels.
  explicit PackedSequence(int64_t length = 0)
      : tokens(static_cast<size_t>(length)),
        labels(static_cast<size_t>(length), kNoLabel),
        doc_start(static_cast<size_t>(length)) {}

  std::vector<int32_t> tokens;     // [length]
  std::vector<int32_t> labels;     // [length] the token that follows, or kNoLabel
  std::vector<int64_t> doc_start;  // [length] where in the sequence the token's document (or what the
                                   // sequence holds of it) begins
};

/// Cuts all tokens into what is trained on and, at the end, a share that is only validated on. The cut may go
/// through a document. `share` in [0, 1).
struct DataSplit {
  TokenSpan training, validation;
};
DataSplit split_tokens(const DocumentTokens& documents, double share);

/// What a sequence is made of.
enum class Packing { kPacked, kOneDocument };

class PackedSequences {
 public:
  enum class Order { kShuffled, kAsStored };

  /// Sequences of `length` tokens out of `part` of the documents, which must outlive this. Throws UserError
  /// (where: `origin`) when there are not enough tokens for one.
  PackedSequences(const DocumentTokens& documents, TokenSpan part, int64_t length, Packing packing,
                  Order order, uint64_t seed, std::string origin);

  int64_t length() const { return length_; }
  int64_t sequences_an_epoch() const;
  PackedSequence sequence(int64_t number);

 private:
  struct Piece {
    int64_t document, first, count;
  };
  // A stretch of a piece that is a sequence of its own.
  struct Cut {
    size_t piece;
    int64_t first, count;
  };
  void cut_pieces();
  void order_epoch(int64_t epoch);
  void put(const Piece& piece, int64_t first, int64_t count, int64_t at, PackedSequence& sequence) const;
  PackedSequence packed(int64_t index) const;
  PackedSequence one_document(const Cut& cut) const;

  const DocumentTokens& documents_;
  int64_t length_;
  Packing packing_;
  Order order_;
  uint64_t seed_;
  int64_t tokens_ = 0;
  std::vector<Piece> pieces_;      // the documents' parts, as stored
  std::vector<Cut> cuts_;          // kOneDocument
  int64_t epoch_ = -1;             // that the following belong to
  std::vector<int64_t> shuffled_;  // pieces in the epoch's order
  std::vector<int64_t> begins_;    // [pieces + 1] of the shuffled pieces in the stream
  std::vector<int64_t> sequences_;
};

}  // namespace longhalo

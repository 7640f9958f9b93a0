#include "dataset/packed_sequences.hpp"

#include <algorithm>
#include <numeric>
#include <random>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

class MemoryDocuments : public DocumentTokens {
 public:
  explicit MemoryDocuments(std::vector<std::vector<int32_t>> documents) : documents_(std::move(documents)) {}
  int64_t documents() const override { return static_cast<int64_t>(documents_.size()); }
  int64_t document_tokens(int64_t document) const override {
    return static_cast<int64_t>(documents_[static_cast<size_t>(document)].size());
  }
  void read(int64_t document, int64_t first, std::span<int32_t> out) const override {
    check(first + static_cast<int64_t>(out.size()) <= document_tokens(document),
          "the tokens are the document's");
    std::copy_n(documents_[static_cast<size_t>(document)].begin() + first, out.size(), out.begin());
  }

 private:
  std::vector<std::vector<int32_t>> documents_;
};

class FileDocuments : public DocumentTokens {
 public:
  explicit FileDocuments(const TokenFile& file) : file_(file) {}
  int64_t documents() const override { return file_.documents(); }
  int64_t document_tokens(int64_t document) const override { return file_.document_tokens(document); }
  void read(int64_t document, int64_t first, std::span<int32_t> out) const override {
    file_.read(document, first, out);
  }

 private:
  const TokenFile& file_;
};

// Fisher and Yates with a generator whose numbers the standard fixes; std::shuffle's are the library's own.
void shuffle(std::vector<int64_t>& values, std::mt19937_64& generator) {
  for (size_t left = values.size(); left > 1; --left)
    std::swap(values[left - 1], values[generator() % left]);
}

std::vector<int64_t> counted_up(int64_t count) {
  std::vector<int64_t> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), int64_t{0});
  return values;
}

}  // namespace

std::unique_ptr<DocumentTokens> documents_of(std::vector<std::vector<int32_t>> documents) {
  return std::make_unique<MemoryDocuments>(std::move(documents));
}

std::unique_ptr<DocumentTokens> documents_of(const TokenFile& file) {
  return std::make_unique<FileDocuments>(file);
}

DataSplit split_tokens(const DocumentTokens& documents, double share) {
  check(share >= 0 && share < 1, "the share to validate on lies in [0, 1)");
  int64_t tokens = 0;
  for (int64_t i = 0; i < documents.documents(); ++i)
    tokens += documents.document_tokens(i);
  const int64_t cut = tokens - static_cast<int64_t>(static_cast<double>(tokens) * share);
  return {{0, cut}, {cut, tokens}};
}

PackedSequences::PackedSequences(const DocumentTokens& documents, TokenSpan part, int64_t length, Order order,
                                 uint64_t seed, std::string origin)
    : documents_(documents), length_(length), order_(order), seed_(seed) {
  check(length >= 1, "a sequence has at least one token");
  int64_t first = 0;  // of the document, over all documents
  for (int64_t i = 0; i < documents.documents(); ++i) {
    const int64_t size = documents.document_tokens(i);
    const int64_t begin = std::max(part.begin, first), end = std::min(part.end, first + size);
    if (begin < end) pieces_.push_back({i, begin - first, end - begin});
    tokens_ += std::max<int64_t>(0, end - begin);
    first += size;
  }
  if (tokens_ < length)
    throw UserError(text("there are ", tokens_, " tokens, less than one sequence of ", length), origin,
                    "give more documents, or make train.sequence_tokens smaller");
}

void PackedSequences::order_epoch(int64_t epoch) {
  if (epoch == epoch_) return;
  epoch_ = epoch;
  std::seed_seq words{static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32),
                      static_cast<uint32_t>(epoch), static_cast<uint32_t>(epoch >> 32)};
  std::mt19937_64 generator(words);
  shuffled_ = counted_up(static_cast<int64_t>(pieces_.size()));
  sequences_ = counted_up(sequences_an_epoch());
  if (order_ == Order::kShuffled) {
    shuffle(shuffled_, generator);
    shuffle(sequences_, generator);
  }
  begins_.assign(1, 0);
  for (const int64_t piece : shuffled_)
    begins_.push_back(begins_.back() + pieces_[static_cast<size_t>(piece)].count);
}

PackedSequence PackedSequences::sequence(int64_t number) {
  check(number >= 0, "sequences are counted from 0");
  order_epoch(number / sequences_an_epoch());
  const int64_t begin = sequences_[static_cast<size_t>(number % sequences_an_epoch())] * length_;
  const int64_t end = begin + length_;
  PackedSequence packed;
  packed.tokens.resize(static_cast<size_t>(length_));
  packed.labels.assign(static_cast<size_t>(length_), kNoLabel);
  packed.doc_start.resize(static_cast<size_t>(length_));
  auto index =
      static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), begin) - begins_.begin()) - 1;
  std::vector<int32_t> read;
  for (int64_t at = begin; at < end; ++index) {
    const Piece& piece = pieces_[static_cast<size_t>(shuffled_[index])];
    const int64_t in_piece = at - begins_[index];
    const int64_t count = std::min(piece.count - in_piece, end - at);
    // One token more, where the document has it, is the last one's label.
    read.resize(static_cast<size_t>(std::min(piece.count - in_piece, count + 1)));
    documents_.read(piece.document, piece.first + in_piece, read);
    std::copy_n(read.begin(), count, packed.tokens.begin() + (at - begin));
    std::copy(read.begin() + 1, read.end(), packed.labels.begin() + (at - begin));
    std::fill_n(packed.doc_start.begin() + (at - begin), count, at - begin);
    at += count;
  }
  return packed;
}

}  // namespace longhalo

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

class AffixedDocuments : public DocumentTokens {
 public:
  AffixedDocuments(std::unique_ptr<DocumentTokens> inner, std::vector<int32_t> prefix,
                   std::vector<int32_t> suffix)
      : inner_(std::move(inner)), prefix_(std::move(prefix)), suffix_(std::move(suffix)) {}
  int64_t documents() const override { return inner_->documents(); }
  int64_t document_tokens(int64_t document) const override {
    return static_cast<int64_t>(prefix_.size() + suffix_.size()) + inner_->document_tokens(document);
  }
  void read(int64_t document, int64_t first, std::span<int32_t> out) const override {
    const auto before = static_cast<int64_t>(prefix_.size());
    const int64_t inner = inner_->document_tokens(document), end = first + static_cast<int64_t>(out.size());
    check(first >= 0 && end <= document_tokens(document), "the tokens are the document's");
    const int64_t from = std::clamp(first, before, before + inner),
                  to = std::clamp(end, from, before + inner);
    if (from < to)
      inner_->read(document, from - before,
                   out.subspan(static_cast<size_t>(from - first), static_cast<size_t>(to - from)));
    for (int64_t i = first; i < end; ++i) {
      if (i < before) out[static_cast<size_t>(i - first)] = prefix_[static_cast<size_t>(i)];
      if (i >= before + inner)
        out[static_cast<size_t>(i - first)] = suffix_[static_cast<size_t>(i - before - inner)];
    }
  }

 private:
  std::unique_ptr<DocumentTokens> inner_;
  std::vector<int32_t> prefix_, suffix_;
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

std::unique_ptr<DocumentTokens> with_affixes(std::unique_ptr<DocumentTokens> documents,
                                             std::vector<int32_t> prefix, std::vector<int32_t> suffix) {
  if (prefix.empty() && suffix.empty()) return documents;
  return std::make_unique<AffixedDocuments>(std::move(documents), std::move(prefix), std::move(suffix));
}

DataSplit split_tokens(const DocumentTokens& documents, double share) {
  check(share >= 0 && share < 1, "the share to validate on lies in [0, 1)");
  int64_t tokens = 0;
  for (int64_t i = 0; i < documents.documents(); ++i)
    tokens += documents.document_tokens(i);
  const int64_t cut = tokens - static_cast<int64_t>(static_cast<double>(tokens) * share);
  return {{0, cut}, {cut, tokens}};
}

PackedSequences::PackedSequences(const DocumentTokens& documents, TokenSpan part, int64_t length,
                                 Packing packing, Order order, uint64_t seed, std::string origin)
    : documents_(documents), length_(length), packing_(packing), order_(order), seed_(seed) {
  check(length >= 1, "a sequence has at least one token");
  int64_t first = 0;  // of the document, over all documents
  for (int64_t i = 0; i < documents.documents(); ++i) {
    const int64_t size = documents.document_tokens(i);
    const int64_t begin = std::max(part.begin, first), end = std::min(part.end, first + size);
    if (begin < end) pieces_.push_back({i, begin - first, end - begin});
    tokens_ += std::max<int64_t>(0, end - begin);
    first += size;
  }
  if (packing == Packing::kOneDocument) cut_pieces();
  const bool can_foresee =
      std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& piece) { return piece.count > 1; });
  if (!can_foresee)
    throw UserError(
        text("there are ", tokens_, " tokens, and no document has two of them: none foretells another"),
        origin, "give longer documents");
  if (sequences_an_epoch() > 0) return;
  throw UserError(
      text("there are ", tokens_, " tokens, less than one sequence of ", length), origin,
      "give more documents, make train.sequence_tokens smaller, or set train.packing: one_document");
}

void PackedSequences::cut_pieces() {
  for (size_t index = 0; index < pieces_.size(); ++index) {
    const int64_t count = pieces_[index].count;
    // A single token at the end has no label: nothing can be learned of it.
    for (int64_t first = 0; first + 1 < count; first += length_)
      cuts_.push_back({index, first, std::min(length_, count - first)});
  }
}

int64_t PackedSequences::sequences_an_epoch() const {
  return packing_ == Packing::kPacked ? tokens_ / length_ : static_cast<int64_t>(cuts_.size());
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
  const int64_t index = sequences_[static_cast<size_t>(number % sequences_an_epoch())];
  return packing_ == Packing::kPacked ? packed(index) : one_document(cuts_[static_cast<size_t>(index)]);
}

// Tokens [first, first + count) of the piece, to stand at `at` of the sequence as a document of their own.
void PackedSequences::put(const Piece& piece, int64_t first, int64_t count, int64_t at,
                          PackedSequence& sequence) const {
  // One token more, where the document has it, is the last one's label.
  std::vector<int32_t> read(static_cast<size_t>(std::min(piece.count - first, count + 1)));
  documents_.read(piece.document, piece.first + first, read);
  std::copy_n(read.begin(), count, sequence.tokens.begin() + at);
  std::copy(read.begin() + 1, read.end(), sequence.labels.begin() + at);
  std::fill_n(sequence.doc_start.begin() + at, count, at);
}

PackedSequence PackedSequences::packed(int64_t index) const {
  PackedSequence sequence(length_);
  const int64_t begin = index * length_, end = begin + length_;
  auto next =
      static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), begin) - begins_.begin()) - 1;
  for (int64_t at = begin; at < end; ++next) {
    const Piece& piece = pieces_[static_cast<size_t>(shuffled_[next])];
    const int64_t in_piece = at - begins_[next];
    const int64_t count = std::min(piece.count - in_piece, end - at);
    put(piece, in_piece, count, at - begin, sequence);
    at += count;
  }
  return sequence;
}

PackedSequence PackedSequences::one_document(const Cut& cut) const {
  PackedSequence sequence(length_);
  put(pieces_[cut.piece], cut.first, cut.count, 0, sequence);
  std::fill(sequence.doc_start.begin() + cut.count, sequence.doc_start.end(), cut.count);
  return sequence;
}

}  // namespace longhalo

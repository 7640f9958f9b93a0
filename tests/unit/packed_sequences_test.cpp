// Packing documents into sequences: every token once an epoch, labels and document starts where they belong,
// and the same sequence for the same number, whatever was asked before.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "../storage/scratch.hpp"
#include "dataset/packed_sequences.hpp"

namespace longhalo {
namespace {

using namespace testing;

// Token values tell where they came from: document * 1000 + position.
std::unique_ptr<DocumentTokens> numbered(const std::vector<int64_t>& sizes) {
  std::vector<std::vector<int32_t>> documents;
  for (size_t d = 0; d < sizes.size(); ++d) {
    documents.emplace_back(static_cast<size_t>(sizes[d]));
    std::iota(documents.back().begin(), documents.back().end(), static_cast<int32_t>(1000 * d));
  }
  return documents_of(std::move(documents));
}

const std::vector<int64_t> kSizes{17, 0, 1, 64, 5, 30, 2};

TEST(PackedSequences, AnEpochHasEveryTokenOnce) {
  const auto documents = numbered(kSizes);
  PackedSequences packed(*documents, {0, 119}, 7, Packing::kPacked, PackedSequences::Order::kShuffled, 5,
                         "test");
  ASSERT_EQ(packed.sequences_an_epoch(), 17);
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    std::set<int32_t> seen;
    for (int64_t k = 0; k < 17; ++k) {
      const PackedSequence one = packed.sequence(17 * epoch + k);
      ASSERT_EQ(one.tokens.size(), 7U);
      for (size_t i = 0; i < 7; ++i) {
        EXPECT_TRUE(seen.insert(one.tokens[i]).second);
        const int64_t document = one.tokens[i] / 1000, position = one.tokens[i] % 1000;
        const bool ends = position + 1 == kSizes[static_cast<size_t>(document)];
        EXPECT_EQ(one.labels[i], ends ? kNoLabel : one.tokens[i] + 1);
        const auto start = static_cast<size_t>(one.doc_start[i]);
        ASSERT_LE(start, i);
        EXPECT_EQ(one.tokens[start], one.tokens[i] - static_cast<int32_t>(i - start));
        EXPECT_TRUE(start == 0 || position == static_cast<int64_t>(i - start))
            << "a document begins at its start";
      }
    }
    EXPECT_EQ(seen.size(), 119U);
  }
}

TEST(PackedSequences, AreAFunctionOfSeedAndNumber) {
  const auto documents = numbered(kSizes);
  const auto make = [&](uint64_t seed) {
    return PackedSequences(*documents, {0, 119}, 7, Packing::kPacked, PackedSequences::Order::kShuffled, seed,
                           "test");
  };
  PackedSequences in_turn = make(5), out_of_turn = make(5), other = make(6);
  std::vector<std::vector<int32_t>> all;
  for (int64_t k = 0; k < 40; ++k)
    all.push_back(in_turn.sequence(k).tokens);
  for (const int64_t k : {39, 0, 17, 16, 20})
    EXPECT_EQ(out_of_turn.sequence(k).tokens, all[static_cast<size_t>(k)]);
  std::vector<std::vector<int32_t>> of_other;
  for (int64_t k = 0; k < 40; ++k)
    of_other.push_back(other.sequence(k).tokens);
  EXPECT_NE(all, of_other);
  EXPECT_FALSE(std::equal(all.begin(), all.begin() + 17, all.begin() + 17)) << "epochs differ";
}

TEST(PackedSequences, ValidationIsTheEnd) {
  const auto documents = numbered(kSizes);
  const DataSplit split = split_tokens(*documents, 0.25);
  EXPECT_EQ(split.training.size(), 90);  // the cut goes through the document of 30
  EXPECT_EQ(split.validation.size(), 29);
  PackedSequences training(*documents, split.training, 10, Packing::kPacked,
                           PackedSequences::Order::kShuffled, 1, "test");
  PackedSequences validation(*documents, split.validation, 10, Packing::kPacked,
                             PackedSequences::Order::kAsStored, 1, "test");
  std::set<int32_t> seen;
  for (int64_t k = 0; k < 9; ++k)
    for (const int32_t token : training.sequence(k).tokens)
      seen.insert(token);
  EXPECT_EQ(validation.sequence(0).tokens[0], 5003);
  for (int64_t k = 0; k < validation.sequences_an_epoch(); ++k)
    for (const int32_t token : validation.sequence(k).tokens)
      EXPECT_TRUE(seen.insert(token).second) << token << " is trained on too";
  EXPECT_EQ(validation.sequence(0).tokens, validation.sequence(2).tokens) << "every epoch is the same";
}

TEST(PackedSequences, TooFewTokensAreRefused) {
  const auto documents = numbered({5, 4});
  expect_user_error(
      [&] {
        PackedSequences(*documents, {0, 9}, 10, Packing::kPacked, PackedSequences::Order::kShuffled, 0,
                        "x.h5");
      },
      {"9 tokens", "10", "x.h5", "train.sequence_tokens"});
}

TEST(PackedSequences, ComeFromTokenFilesToo) {
  const ScratchFolder folder;
  TokenFileWriter writer(folder / "t.h5", {100, "", ""});
  writer.append_document("a", std::vector<int32_t>{1, 2, 3});
  writer.append_document("b", std::vector<int32_t>{4, 5, 6, 7});
  writer.commit();
  const TokenFile file(folder / "t.h5");
  const auto documents = documents_of(file);
  PackedSequences packed(*documents, {0, 7}, 5, Packing::kPacked, PackedSequences::Order::kAsStored, 0,
                         "test");
  const PackedSequence one = packed.sequence(0);
  EXPECT_EQ(one.tokens, (std::vector<int32_t>{1, 2, 3, 4, 5}));
  EXPECT_EQ(one.labels, (std::vector<int32_t>{2, 3, kNoLabel, 5, 6}));
  EXPECT_EQ(one.doc_start, (std::vector<int64_t>{0, 0, 0, 3, 3}));
}

// A sequence's tokens that have labels, or are labels: those of its document.
TEST(OneDocument, ASequenceHoldsOneDocument) {
  const auto documents = numbered(kSizes);
  constexpr size_t kLength = 20;
  PackedSequences sequences(*documents, {0, 119}, kLength, Packing::kOneDocument,
                            PackedSequences::Order::kShuffled, 5, "test");
  // 17, 64 cut in four (the last of 4), 5, 30 cut in two, 2; a document of one token has no label.
  ASSERT_EQ(sequences.sequences_an_epoch(), 1 + 4 + 1 + 2 + 1);
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    std::set<int32_t> seen;
    for (int64_t k = 0; k < 9; ++k) {
      const PackedSequence one = sequences.sequence(9 * epoch + k);
      const int64_t document = one.tokens[0] / 1000, first = one.tokens[0] % 1000;
      const auto size =
          static_cast<size_t>(std::min<int64_t>(kLength, kSizes[static_cast<size_t>(document)] - first));
      for (size_t i = 0; i < kLength; ++i) {
        if (i >= size) {
          EXPECT_EQ(one.tokens[i], 0);
          EXPECT_EQ(one.labels[i], kNoLabel);
          EXPECT_EQ(one.doc_start[i], static_cast<int64_t>(size))
              << "what fills up does not see the document";
          continue;
        }
        EXPECT_TRUE(seen.insert(one.tokens[i]).second);
        EXPECT_EQ(one.tokens[i], one.tokens[0] + static_cast<int32_t>(i));
        const bool ends = one.tokens[i] % 1000 + 1 == kSizes[static_cast<size_t>(document)];
        EXPECT_EQ(one.labels[i], ends ? kNoLabel : one.tokens[i] + 1);
        EXPECT_EQ(one.doc_start[i], 0);
      }
    }
    EXPECT_EQ(seen.size(), 118U);
  }
}

TEST(OneDocument, CutsAtTheSplitAndDropsWhatHasNoLabel) {
  const auto documents = numbered({41, 1});
  PackedSequences training(*documents, {0, 30}, 20, Packing::kOneDocument, PackedSequences::Order::kAsStored,
                           0, "test");
  ASSERT_EQ(training.sequences_an_epoch(), 2);
  EXPECT_EQ(training.sequence(0).labels[19], 20) << "the label lies in the next sequence";
  EXPECT_EQ(training.sequence(1).labels[9], kNoLabel) << "the next token is validated on";
  PackedSequences whole(*documents, {0, 42}, 20, Packing::kOneDocument, PackedSequences::Order::kAsStored, 0,
                        "test");
  EXPECT_EQ(whole.sequences_an_epoch(), 2) << "the 41st token has no label";
  EXPECT_EQ(whole.sequence(1).labels[19], 40) << "but is one";
  expect_user_error(
      [&] {
        PackedSequences(*documents, {41, 42}, 20, Packing::kOneDocument, PackedSequences::Order::kShuffled, 0,
                        "x.h5");
      },
      {"1 tokens", "x.h5"});
}

TEST(Packed, DocumentsOfOneTokenTeachNothing) {
  const auto documents = numbered({1, 1, 1, 1});
  for (const Packing packing : {Packing::kPacked, Packing::kOneDocument})
    expect_user_error(
        [&] {
          PackedSequences(*documents, {0, 4}, 2, packing, PackedSequences::Order::kShuffled, 0, "x.h5");
        },
        {"4 tokens", "no document has two", "x.h5"});
  const auto one_pair = numbered({1, 2, 1});
  EXPECT_EQ(
      PackedSequences(*one_pair, {0, 4}, 2, Packing::kPacked, PackedSequences::Order::kShuffled, 0, "x.h5")
          .sequences_an_epoch(),
      2);
}

TEST(Affixes, StandAroundEveryDocument) {
  const auto documents = with_affixes(numbered({3, 0, 1}), {-1, -2}, {-3});
  const std::vector<std::vector<int32_t>> expected{{-1, -2, 0, 1, 2, -3}, {-1, -2, -3}, {-1, -2, 2000, -3}};
  ASSERT_EQ(documents->documents(), 3);
  for (int64_t d = 0; d < 3; ++d) {
    const std::vector<int32_t>& all = expected[static_cast<size_t>(d)];
    ASSERT_EQ(documents->document_tokens(d), static_cast<int64_t>(all.size()));
    for (size_t first = 0; first <= all.size(); ++first) {
      for (size_t end = first; end <= all.size(); ++end) {
        std::vector<int32_t> read(end - first, 99);
        documents->read(d, static_cast<int64_t>(first), read);
        EXPECT_TRUE(std::equal(read.begin(), read.end(), all.begin() + static_cast<ptrdiff_t>(first)))
            << d << " " << first << " " << end;
      }
    }
  }
}

}  // namespace
}  // namespace longhalo

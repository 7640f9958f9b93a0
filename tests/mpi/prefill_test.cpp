// A model over several ranks against the fp64 reference over the whole sequence, with shards of 128 tokens
// and windows and strides so small that every path is taken: halos from several ranks, ranks that own
// nothing, many landmarks, several scales, generation beyond the window.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "comm/shard_plan.hpp"
#include "kernels/logits/logits.hpp"
#include "kernels/matmul/matmul.hpp"
#include "model/decoder.hpp"
#include "model/outputs.hpp"
#include "model/prefill.hpp"
#include "support/mpi_main.hpp"
#include "support/reference_model.hpp"

namespace longhalo::test {
namespace {

// Two runs on different numbers of ranks must agree within 1e-5: each is held to half of that from the truth.
constexpr double kTolerance = 5e-6;

struct Case {
  std::string name;
  AttentionPattern pattern;
};

std::vector<Case> cases() {
  return {
      {"window and landmarks", AttentionPattern::window_and_landmarks(200, 8)},
      {"window shorter than a shard", AttentionPattern::window_and_landmarks(33, 33)},
      {"window of one token", AttentionPattern::window_and_landmarks(1, 1)},
      {"window alone", AttentionPattern::window_and_landmarks(150, 0)},
      {"dense", {{{1, 0, kUnlimited}}}},
      {"window beyond the sequence", AttentionPattern::window_and_landmarks(5000, 64)},
      {"three scales", {{{1, 0, 96}, {8, 96, 320}, {32, 320, kUnlimited}}}},
      {"four scales", {{{1, 0, 40}, {4, 40, 128}, {16, 128, 384}, {64, 384, kUnlimited}}}},
      {"landmarks alone", {{{8, 8, kUnlimited}}}},
  };
}

std::vector<double> reference_logits(const Weights& weights, std::span<const double> hidden) {
  const ModelConfig& c = weights.config;
  const auto n = static_cast<int64_t>(hidden.size()) / c.hidden;
  const std::vector<double> head(weights.head(), weights.head() + c.vocabulary * c.hidden);
  std::vector<double> logits(static_cast<size_t>(n * c.vocabulary));
  matmul_reference(n, c.vocabulary, c.hidden, hidden.data(), head.data(), logits.data());
  return logits;
}

class PrefillTest : public testing::TestWithParam<int64_t> {
 protected:
  static void SetUpTestSuite() { set_kernel_threads(1); }
};

TEST_P(PrefillTest, AgreesWithTheReference) {
  const int64_t tokens = GetParam();
  for (const Case& test : cases()) {
    SCOPED_TRACE(test.name);
    const auto strided = static_cast<int64_t>(test.pattern.strides().size());
    const Weights weights = small_model(2, 4, 2, strided, 7);
    const ModelConfig& c = weights.config;
    const std::vector<int32_t> document = random_tokens(tokens, c.vocabulary, 11);
    const std::vector<int32_t> more = random_tokens(70, c.vocabulary, 12);
    std::vector<int32_t> all = document;
    all.insert(all.end(), more.begin(), more.end());
    const std::vector<double> hidden =
        made_by_root<double>([&] { return reference_hidden(weights, test.pattern, all); });

    const ShardPlan shards(tokens, session().ranks(), shard_alignment(test.pattern.strides()));
    Prefill prefill(session(), weights, test.pattern, shards, 50);
    std::optional<Context> context = prefill.run(document, KeepContext::kYes);
    ASSERT_TRUE(context);
    EXPECT_EQ(context->position(), tokens);

    // The shard's own hidden states.
    const TokenRange shard = prefill.shard();
    std::vector<float> own(static_cast<size_t>(shard.size() * c.hidden));
    final_norm(weights, shard.size(), prefill.residual(), own.data());
    const std::span<const double> expected =
        std::span(hidden).subspan(static_cast<size_t>(shard.begin * c.hidden), own.size());
    EXPECT_LE(relative_error(own, expected), kTolerance);

    // Scores and embeddings, on rank 0.
    const std::vector<float> scores = score_tokens(session(), weights, shards, document, prefill.residual());
    const int64_t opening = std::min<int64_t>(tokens - 1, 37);  // as a chat template's
    const std::vector<float> chunks =
        embed_chunks(session(), weights, shards, prefill.residual(), 100, opening);
    const std::vector<double> logits =
        made_by_root<double>([&] { return reference_logits(weights, hidden); });
    if (session().is_root()) {
      ASSERT_EQ(scores.size(), document.size());
      EXPECT_EQ(scores[0], 0);
      for (size_t i = 1; i < scores.size(); ++i) {
        const double* row = logits.data() + (i - 1) * static_cast<size_t>(c.vocabulary);
        double sum = 0;
        for (int64_t v = 0; v < c.vocabulary; ++v)
          sum += std::exp(row[v]);
        ASSERT_NEAR(scores[i], row[document[i]] - std::log(sum), 2e-5) << "token " << i;
      }
      std::vector<double> means;
      for (int64_t begin = opening; begin < tokens; begin += 100) {
        const int64_t end = std::min(tokens, begin + 100);
        for (int64_t e = 0; e < c.hidden; ++e) {
          double sum = 0;
          for (int64_t t = begin; t < end; ++t)
            sum += hidden[static_cast<size_t>(t * c.hidden + e)];
          means.push_back(sum / static_cast<double>(end - begin));
        }
      }
      EXPECT_LE(relative_error(chunks, means), kTolerance);
    } else {
      EXPECT_TRUE(scores.empty() && chunks.empty());
    }

    // Every rank goes on from the same context: in one portion, and token by token.
    Decoder decoder(weights, test.pattern, 32);
    const auto vocabulary = static_cast<size_t>(c.vocabulary);
    const std::span<const double> last = std::span(logits).last(vocabulary);
    Context portion = context->clone();
    EXPECT_LE(relative_error(decoder.extend(portion, more), last), kTolerance);
    for (size_t i = 0; i < more.size(); ++i) {
      const std::span<const float> step = decoder.extend(*context, std::span(more).subspan(i, 1));
      const auto row = (static_cast<size_t>(tokens) + i) * vocabulary;
      ASSERT_LE(relative_error(step, std::span<const double>(logits).subspan(row, vocabulary)), kTolerance)
          << "token " << i << " after the document";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Lengths, PrefillTest, testing::Values(1, 5, 127, 128, 300, 641, 897));

// Changing tokens from position t on leaves every hidden state before t as it was, bit for bit.
TEST(Causality, TheFutureNeverChangesThePast) {
  set_kernel_threads(1);
  for (const Case& test : cases()) {
    SCOPED_TRACE(test.name);
    const Weights weights = small_model(2, 4, 2, static_cast<int64_t>(test.pattern.strides().size()), 21);
    const std::vector<int32_t> document = random_tokens(641, weights.config.vocabulary, 22);
    const ShardPlan shards(641, session().ranks(), shard_alignment(test.pattern.strides()));
    Prefill original(session(), weights, test.pattern, shards, 50);
    original.run(document, KeepContext::kNo);
    for (const int64_t t : {1, 130, 333, 640}) {
      std::vector<int32_t> changed = document;
      for (size_t i = static_cast<size_t>(t); i < changed.size(); ++i)
        changed[i] = static_cast<int32_t>((changed[i] + 1) % weights.config.vocabulary);
      Prefill other(session(), weights, test.pattern, shards, 50);
      other.run(changed, KeepContext::kNo);
      const TokenRange past = intersect(original.shard(), {0, t});
      const auto bytes = static_cast<size_t>(past.size() * weights.config.hidden) * sizeof(float);
      if (bytes > 0) {
        EXPECT_EQ(std::memcmp(original.residual(), other.residual(), bytes), 0) << "from " << t;
      }
      if (!original.shard().empty() && original.shard().end == 641) {
        const int64_t last = (original.shard().size() - 1) * weights.config.hidden;
        EXPECT_NE(original.residual()[last], other.residual()[last]) << "the last token did change";
      }
    }
  }
}

// Decoding from nothing is the same computation as prefill.
TEST(Decoder, StartsFromAnEmptyContext) {
  const AttentionPattern pattern = AttentionPattern::window_and_landmarks(20, 4);
  const Weights weights = small_model(3, 6, 1, 1, 3);
  const std::vector<int32_t> tokens = random_tokens(200, weights.config.vocabulary, 4);
  const std::vector<double> logits = made_by_root<double>(
      [&] { return reference_logits(weights, reference_hidden(weights, pattern, tokens)); });
  Decoder decoder(weights, pattern, 7);
  Context context(weights.config, pattern);
  const std::span<const float> last = decoder.extend(context, tokens);
  const auto vocabulary = static_cast<size_t>(weights.config.vocabulary);
  EXPECT_LE(relative_error(last, std::span<const double>(logits).last(vocabulary)), kTolerance);
}

// The context does not grow with the sequence, but for its landmarks.
TEST(Context, StaysSmall) {
  const AttentionPattern pattern = AttentionPattern::window_and_landmarks(64, 16);
  const Weights weights = small_model(1, 2, 1, 1, 3);
  Decoder decoder(weights, pattern, 16);
  Context context(weights.config, pattern);
  const std::vector<int32_t> tokens = random_tokens(1000, weights.config.vocabulary, 4);
  for (const int32_t token : tokens)
    decoder.extend(context, std::span(&token, 1));
  const int64_t row = 2 * weights.config.kv_size() * 4;
  EXPECT_GE(context.bytes(), (64 + 1000 / 16) * row);
  EXPECT_LE(context.bytes(), (64 + 64 + 16 + 1000 / 16 + 1) * row);
}

}  // namespace
}  // namespace longhalo::test

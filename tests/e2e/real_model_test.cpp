// SmolLM2-135M-Instruct on several ranks: against `transformers` where the window holds the whole text, and
// against one rank where window and stride are so small that halos come from several ranks and some ranks own
// nothing.
#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>

#include "comm/shard_plan.hpp"
#include "kernels/logits/logits.hpp"
#include "kernels/matmul/matmul.hpp"
#include "model/generator.hpp"
#include "model/outputs.hpp"
#include "model/prefill.hpp"
#include "real_model.hpp"
#include "storage/hdf5.hpp"
#include "support/mpi_main.hpp"
#include "support/reference_model.hpp"

namespace longhalo::test {
namespace {

const std::filesystem::path kReference =
    std::filesystem::path(LONGHALO_SOURCE_DIR) / "data/transformers_reference.h5";
constexpr double kLargestLogitDifference = 2e-3;
constexpr double kBetweenRanks = 1e-5;  // relative
constexpr int64_t kTile = 256;

template <class T>
std::vector<T> stored(const std::string& name) {
  const Hdf5File file = Hdf5File::open(kReference);
  const Hdf5Dataset dataset = file.dataset(name);
  std::vector<T> values(static_cast<size_t>(dataset.rows() * dataset.row_values()));
  dataset.read(0, std::span<T>(values));
  return values;
}

class RealModel : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    set_kernel_threads(1);
    if (!why_no_real_model().empty()) return;
    weights_ = std::make_unique<Weights>(load_weights(kRealModel, read_model_config(kRealModel), {1, {}}));
  }
  static void TearDownTestSuite() { weights_.reset(); }
  // Where the result on one rank and on two is checked, more ranks are checked against one rank below.
  static bool few_ranks() { return session().ranks() <= 2; }
  void SetUp() override {
    if (weights_ == nullptr) GTEST_SKIP() << why_no_real_model();
  }

  static std::optional<Context> prefill(const MpiSession& ranks, const AttentionPattern& pattern,
                                        std::span<const int32_t> tokens) {
    const ShardPlan shards(static_cast<int64_t>(tokens.size()), ranks.ranks(),
                           shard_alignment(pattern.strides()));
    return Prefill(ranks, *weights_, pattern, shards, kTile).run(tokens, KeepContext::kYes);
  }

  static Generation generate(Decoder& decoder, Context& context, std::span<const int32_t> prompt,
                             std::span<const int32_t> end_tokens, const GenerateOptions& options) {
    CpuContinuation continuation(decoder, context);
    return longhalo::generate(continuation, prompt, end_tokens, options);
  }

  static std::unique_ptr<Weights> weights_;
};
std::unique_ptr<Weights> RealModel::weights_;

const AttentionPattern kDenseWindow =
    AttentionPattern::window_and_landmarks(2048, 256);  // longer than the text

TEST_F(RealModel, LogitsScoresAndEmbeddingsAreThoseOfTransformers) {
  if (!few_ranks()) GTEST_SKIP() << "runs on 1 and 2 ranks";
  const ModelConfig& c = weights_->config;
  const auto tokens = stored<int32_t>("token_ids");
  const ShardPlan shards(static_cast<int64_t>(tokens.size()), session().ranks(), 256);
  Prefill prefill(session(), *weights_, kDenseWindow, shards, kTile);
  prefill.run(tokens, KeepContext::kNo);

  std::vector<float> hidden(static_cast<size_t>(c.hidden)), logits(static_cast<size_t>(c.vocabulary));
  const auto logits_at = [&](int64_t position) {
    final_norm(*weights_, 1, prefill.residual() + (position - prefill.shard().begin) * c.hidden,
               hidden.data());
    logits_of(*weights_, 1, hidden.data(), logits.data());
  };
  const auto mine = [&](int64_t position) {
    return position >= prefill.shard().begin && position < prefill.shard().end;
  };

  int64_t compared = 0;
  const auto full = stored<int32_t>("full/positions");
  const auto full_logits = stored<float>("full/logits");
  for (size_t i = 0; i < full.size(); ++i) {
    if (!mine(full[i])) continue;
    logits_at(full[i]);
    for (size_t v = 0; v < logits.size(); ++v)
      ASSERT_NEAR(logits[v], full_logits[i * logits.size() + v], kLargestLogitDifference)
          << full[i] << ", " << v;
    ++compared;
  }
  const auto positions = stored<int32_t>("sampled/positions");
  const auto ids = stored<int32_t>("sampled/vocabulary_ids");
  const auto sampled = stored<float>("sampled/logits");
  const auto normalisers = stored<float>("sampled/logsumexp");
  const auto best = stored<int32_t>("sampled/argmax");
  for (size_t i = 0; i < positions.size(); ++i) {
    if (!mine(positions[i])) continue;
    logits_at(positions[i]);
    for (size_t v = 0; v < ids.size(); ++v)
      ASSERT_NEAR(logits[static_cast<size_t>(ids[v])], sampled[i * ids.size() + v], kLargestLogitDifference);
    double normaliser = 0;
    log_sum_exp(1, c.vocabulary, logits.data(), &normaliser);
    EXPECT_NEAR(normaliser, normalisers[i], kLargestLogitDifference);
    EXPECT_EQ(argmax(c.vocabulary, logits.data()), best[i]);
    ++compared;
  }
  EXPECT_EQ(sum_over_ranks(session(), compared), 68) << "every stored position has an owner";

  const std::vector<float> scores = score_tokens(session(), *weights_, shards, tokens, prefill.residual());
  const std::vector<float> means = embed_chunks(session(), *weights_, shards, prefill.residual(), 256);
  if (!session().is_root()) return;
  const auto expected = stored<float>("token_logprob");
  ASSERT_EQ(scores.size(), expected.size() + 1);
  for (size_t i = 0; i < expected.size(); ++i)
    ASSERT_NEAR(scores[i + 1], expected[i], kLargestLogitDifference);
  EXPECT_LE(relative_error(means, stored<float>("embed/means")), 1e-4);
}

TEST_F(RealModel, GreedyTokensAreThoseOfTransformers) {
  if (!few_ranks()) GTEST_SKIP() << "runs on 1 and 2 ranks";
  for (const std::string name : {"generate/short", "generate/document"}) {
    SCOPED_TRACE(name);
    const auto prompt = stored<int32_t>(name + "/prompt_ids");
    const auto expected = stored<int32_t>(name + "/output_ids");
    // All but the last token are the document; every rank answers from the shared context.
    const std::span<const int32_t> document = std::span(prompt).first(prompt.size() - 1);
    std::optional<Context> context = prefill(session(), kDenseWindow, document);
    Decoder decoder(*weights_, kDenseWindow, kTile);
    GenerateOptions options;
    options.max_new_tokens = static_cast<int64_t>(expected.size());
    const Generation answer =
        generate(decoder, *context, std::span(prompt).last(1), weights_->config.eos_ids, options);
    EXPECT_EQ(answer.tokens, expected);
    EXPECT_EQ(answer.finish_reason, FinishReason::kLength);
  }
}

// 600 tokens are five blocks of 128: on 7 ranks two own nothing; a window of 300 reaches over three ranks; 75
// landmarks.
TEST_F(RealModel, AnyNumberOfRanksGivesTheSameLogitsAndTokens) {
  const AttentionPattern pattern = AttentionPattern::window_and_landmarks(300, 8);
  const auto text = stored<int32_t>("token_ids");
  const std::span<const int32_t> document = std::span(text).first(600),
                                 prompt = std::span(text).subspan(600, 20);
  Decoder decoder(*weights_, pattern, kTile);
  GenerateOptions options;
  options.max_new_tokens = 32;

  // Rank 0 does it alone first.
  std::vector<int32_t> answer_of_one;
  const std::vector<float> logits_of_one = made_by_root<float>([&] {
    const MpiSession alone(MPI_COMM_SELF);
    std::optional<Context> one = prefill(alone, pattern, document);
    Context copy = one->clone();
    answer_of_one = generate(decoder, *one, prompt, {}, options).tokens;
    const std::span<const float> logits = decoder.extend(copy, prompt);
    return std::vector<float>(logits.begin(), logits.end());
  });
  answer_of_one = made_by_root<int32_t>([&] { return answer_of_one; });

  std::optional<Context> all = prefill(session(), pattern, document);
  Context copy = all->clone();
  EXPECT_LE(relative_error(decoder.extend(copy, prompt), std::span<const float>(logits_of_one)),
            kBetweenRanks);
  EXPECT_EQ(generate(decoder, *all, prompt, {}, options).tokens, answer_of_one);
}

// Sampling draws from the seed alone.
TEST_F(RealModel, SamplingRepeatsWithItsSeed) {
  if (!few_ranks()) GTEST_SKIP() << "runs on 1 and 2 ranks";
  const auto prompt = stored<int32_t>("generate/short/prompt_ids");
  Decoder decoder(*weights_, kDenseWindow, kTile);
  GenerateOptions options;
  options.max_new_tokens = 24;
  options.temperature = 1.0;
  options.top_p = 0.95;
  const auto sample = [&](uint64_t seed) {
    options.seed = seed;
    Context context(weights_->config, kDenseWindow);
    return generate(decoder, context, prompt, {}, options).tokens;
  };
  const std::vector<int32_t> first = sample(1);
  EXPECT_EQ(sample(1), first);
  EXPECT_NE(sample(2), first);
}

}  // namespace
}  // namespace longhalo::test

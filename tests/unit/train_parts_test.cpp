// The pure parts of training: AdamW against the formula in fp64, learning rates, how gradients are cut up,
// the list of parameters.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "model/adamw.hpp"
#include "model/attention_pattern.hpp"
#include "model/bucket_plan.hpp"
#include "model/parameters.hpp"

namespace longhalo {
namespace {

TEST(AdamW, FollowsTheFormula) {
  constexpr size_t kCount = 1000;
  std::mt19937_64 generator(3);
  std::normal_distribution<float> normal;
  const AdamWOptions options{0.9, 0.95, 1e-8, 0.1};
  std::vector<float> w(kCount), m(kCount), v(kCount), g(kCount);
  for (float& value : w)
    value = normal(generator);
  std::vector<double> wide_w(w.begin(), w.end()), wide_m(kCount), wide_v(kCount);
  for (int64_t step = 1; step <= 50; ++step) {
    const double rate = 1e-3 * static_cast<double>(step), scale = step % 2 == 0 ? 0.25 : 1;
    for (float& value : g)
      value = normal(generator);
    adamw_update(options, rate, options.weight_decay, step, scale, g, {w, m, v});
    for (size_t i = 0; i < kCount; ++i) {
      const double gradient = scale * static_cast<double>(g[i]);
      wide_m[i] = 0.9 * wide_m[i] + (1 - 0.9) * gradient;
      wide_v[i] = 0.95 * wide_v[i] + (1 - 0.95) * gradient * gradient;
      const double mean = wide_m[i] / (1 - std::pow(0.9, step)),
                   square = wide_v[i] / (1 - std::pow(0.95, step));
      wide_w[i] -= rate * (mean / (std::sqrt(square) + 1e-8) + 0.1 * wide_w[i]);
    }
  }
  // A step moves a weight by about the rate, at most 0.05, with fp32 roundings of its own size: 50 of them.
  const double tolerance = 50 * 8 * std::pow(2.0, -24);
  for (size_t i = 0; i < kCount; ++i)
    ASSERT_NEAR(w[i], wide_w[i], tolerance * std::max(1.0, std::abs(wide_w[i]))) << i;
}

TEST(AdamW, WithoutGradientOnlyDecays) {
  std::vector<float> w{2, -3}, m(2), v(2);
  adamw_update({}, 0.5, 0.1, 1, 1, std::vector<float>{0, 0}, {w, m, v});
  EXPECT_FLOAT_EQ(w[0], 1.9F);
  EXPECT_FLOAT_EQ(w[1], -2.85F);
  adamw_update({}, 0.5, 0, 2, 1, std::vector<float>{0, 0}, {w, m, v});
  EXPECT_FLOAT_EQ(w[0], 1.9F);
}

TEST(AttentionPattern, VisiblePairsOfASequenceAreThoseOfItsTokens) {
  const std::vector<AttentionPattern> patterns = {AttentionPattern::window_and_landmarks(9, 4),
                                                  AttentionPattern::window_and_landmarks(7, 0),
                                                  {{{1, 0, kUnlimited}}},
                                                  {{{1, 0, 6}, {2, 6, 16}, {4, 16, kUnlimited}}},
                                                  {{{1, 0, 5}, {8, 8, 30}, {3, 20, 21}}},
                                                  {{{1, 0, 4}, {5, 0, 3}}}};
  for (const AttentionPattern& pattern : patterns) {
    int64_t pairs = 0;
    for (int64_t n = 0; n < 200; ++n) {
      ASSERT_EQ(sequence_visible_pairs(pattern, n), pairs) << pattern.describe() << ", " << n;
      for (const Band& band : pattern.bands)
        pairs += visible_keys(band, n).count();
    }
  }
  // Without a loop over the tokens.
  const int64_t n = int64_t{1} << 31;
  EXPECT_EQ(sequence_visible_pairs({{{1, 0, kUnlimited}}}, n), n / 2 * (n + 1));
}

TEST(Schedule, Cosine) {
  const LearningRateSchedule schedule{ScheduleShape::kCosine, 1.0, 0.1, 10, 0, 110};
  EXPECT_DOUBLE_EQ(schedule.rate(1), 0.1);
  EXPECT_DOUBLE_EQ(schedule.rate(10), 1.0);
  EXPECT_NEAR(schedule.rate(60), 0.55, 1e-12);  // half way
  EXPECT_NEAR(schedule.rate(35), 0.1 + 0.9 * (1 + std::sqrt(0.5)) / 2, 1e-12);
  EXPECT_DOUBLE_EQ(schedule.rate(110), 0.1);
  EXPECT_DOUBLE_EQ(schedule.rate(200), 0.1);
  for (int64_t step = 11; step <= 110; ++step)
    EXPECT_LT(schedule.rate(step), schedule.rate(step - 1));
  const LearningRateSchedule no_warmup{ScheduleShape::kCosine, 1.0, 0, 0, 0, 2};
  EXPECT_NEAR(no_warmup.rate(1), 0.5, 1e-12);
}

TEST(Schedule, WarmupStableDecay) {
  const LearningRateSchedule schedule{ScheduleShape::kWarmupStableDecay, 2.0, 1.0, 4, 10, 50};
  EXPECT_DOUBLE_EQ(schedule.rate(2), 1.0);
  for (int64_t step = 4; step <= 40; ++step)
    EXPECT_DOUBLE_EQ(schedule.rate(step), 2.0);
  EXPECT_DOUBLE_EQ(schedule.rate(45), 1.5);
  EXPECT_DOUBLE_EQ(schedule.rate(50), 1.0);
  const LearningRateSchedule no_decay{ScheduleShape::kWarmupStableDecay, 2.0, 1.0, 0, 0, 5};
  EXPECT_DOUBLE_EQ(no_decay.rate(4), 2.0);
}

TEST(BucketPlan, EveryElementHasOneOwner) {
  for (const int64_t elements : {0, 1, 5, 64, 1000, 1024}) {
    for (const int ranks : {1, 2, 3, 7}) {
      for (const int64_t bucket : {1, 3, 64, 5000}) {
        const BucketPlan plan(elements, ranks, bucket);
        std::vector<int64_t> owned(static_cast<size_t>(ranks));
        int64_t next = 0;
        for (int64_t index = 0; index < plan.buckets(); ++index) {
          EXPECT_EQ(plan.bucket(index).begin, next);
          for (int rank = 0; rank < ranks; ++rank) {
            const ElementRange part = plan.part(index, rank);
            EXPECT_EQ(part.begin, next);
            EXPECT_LE(std::abs(part.size() * ranks - plan.bucket(index).size()), ranks);
            EXPECT_EQ(plan.owned_before(index, rank), owned[static_cast<size_t>(rank)]);
            owned[static_cast<size_t>(rank)] += part.size();
            next = part.end;
          }
          EXPECT_EQ(plan.bucket(index).end, next);
          EXPECT_EQ(plan.complete_buckets(next), index + 1);
          if (plan.bucket(index).size() > 0) {
            EXPECT_EQ(plan.complete_buckets(next - 1), index);
          }
        }
        EXPECT_EQ(next, elements);
        for (int rank = 0; rank < ranks; ++rank)
          EXPECT_EQ(plan.owned(rank), owned[static_cast<size_t>(rank)]);
      }
    }
  }
}

ModelConfig small_config() {
  ModelConfig config;
  config.layers = 2;
  config.hidden = 8;
  config.ffn = 12;
  config.heads = 2;
  config.kv_heads = 1;
  config.head_dim = 8;
  config.vocabulary = 10;
  return config;
}

TEST(Parameters, AreTheWholeModelInOrderOfBackward) {
  Weights weights = random_weights(small_config(), {2, {}}, 1);
  add_landmark_queries(weights, 2);
  const std::vector<Parameter> all = parameters_of(weights);
  // Matrices and norms, and of each layer a bias for each head and two landmark queries.
  EXPECT_EQ(elements_of(all), weights.config.parameters() + 2 * (2 + 2 * 8));
  EXPECT_EQ(all.front().name, "lm_head.weight");
  EXPECT_EQ(all.back().name, "model.embed_tokens.weight");
  EXPECT_EQ(all[2].name, "model.layers.1.mlp.down_proj.weight");
  for (const Parameter& parameter : all) {
    const bool plain = parameter.name.find("norm") != std::string::npos ||
                       parameter.name.find("landmark") != std::string::npos;
    EXPECT_EQ(parameter.decay, plain ? Decay::kNo : Decay::kYes) << parameter.name;
  }

  Weights copy = zeros_like(weights);
  const std::vector<Parameter> targets = parameters_of(copy);
  ASSERT_EQ(elements_of(targets), elements_of(all));
  std::vector<float> flat(97);
  for (int64_t begin = 0; begin < elements_of(all); begin += 97) {
    const auto part =
        std::span(flat).first(static_cast<size_t>(std::min<int64_t>(97, elements_of(all) - begin)));
    copy_from_parameters(all, begin, part);
    copy_to_parameters(targets, begin, part);
  }
  for (size_t i = 0; i < all.size(); ++i)
    EXPECT_TRUE(std::equal(all[i].values.begin(), all[i].values.end(), targets[i].values.begin()))
        << all[i].name;
}

}  // namespace
}  // namespace longhalo

// The engine as a job drives it: random weights, a plan that holds, a document, its answers.
#include <numeric>

#include "device_model_fixture.hpp"
#include "model/cuda_engine.hpp"
#include "model/prefill.hpp"

namespace longhalo::testing {
namespace {

using test::random_tokens;
using test::session;

class CudaEngineTest : public RankTest {
 protected:
  static ModelConfig shape() {
    ModelConfig config = device_test_shape(64);
    config.vocabulary = 512;
    config.tied_embeddings = true;
    return config;
  }
  static std::unique_ptr<Engine> made(const ModelConfig& config, Precision precision = Precision::kBf16) {
    return make_cuda_engine(session(), std::make_unique<Device>(device().info().index),
                            TransportChoice::kAuto, config, pattern(), precision);
  }
  static std::unique_ptr<Engine> loaded(const ModelConfig& config) {
    std::unique_ptr<Engine> engine = made(config);
    engine->load_weights({std::nullopt, 3, {1, {}}});
    return engine;
  }
  static AttentionPattern pattern() { return AttentionPattern::window_and_landmarks(256, 32); }
};

int64_t bytes_of(const std::vector<MemoryItem>& items) {
  return std::accumulate(items.begin(), items.end(), int64_t{0},
                         [](int64_t sum, const MemoryItem& item) { return sum + item.bytes; });
}

TEST_F(CudaEngineTest, ThePlanCoversWhatADocumentTakes) {
  const ModelConfig config = shape();
  const std::unique_ptr<Engine> engine = loaded(config);
  const std::vector<int32_t> document = random_tokens(50'000, config.vocabulary, 1);
  const ShardPlan shards = plan_shards(config, pattern(), 50'000, session().ranks());
  constexpr int64_t kTile = 2048;
  for (const KeepContext keep : {KeepContext::kNo, KeepContext::kYes}) {
    const Wanted wanted{keep, true, 256};
    const std::vector<MemoryItem> items = engine->memory(shards, kTile, wanted);
    const int64_t planned = bytes_of(items) - items.front().bytes;
    EXPECT_EQ(items.front().name, "weights");
    const int64_t before = memory_pool().use().used_bytes;
    const std::unique_ptr<Reading> reading = engine->read(shards, kTile);
    reading->prefill(document, keep);
    reading->require_finite();
    reading->scores(document);
    reading->embeddings(256, 0);
    const int64_t used = engine->device_memory().arrays_bytes - before;
    EXPECT_LE(used, planned + (int64_t{1} << 20));  // small arrays, and the pool's rounding
    if (session().ranks() == 1) {
      EXPECT_GE(used, planned / 2);  // and it does not ask for what is never used
    }
  }
}

TEST_F(CudaEngineTest, AnswersFollowTheMostLikelyTokens) {
  const ModelConfig config = shape();
  const std::unique_ptr<Engine> engine = loaded(config);
  const std::vector<int32_t> document = random_tokens(1500, config.vocabulary, 2);
  const ShardPlan shards = plan_shards(config, pattern(), 1500, session().ranks());
  std::unique_ptr<DocumentContext> context;
  {
    const std::unique_ptr<Reading> reading = engine->read(shards, 1024);
    reading->prefill(document, KeepContext::kYes);
    context = reading->take_context();
  }
  ASSERT_NE(context, nullptr);
  EXPECT_GT(context->bytes(), 0);

  const std::vector<int32_t> prompt = random_tokens(30, config.vocabulary, 3);
  GenerateOptions options;
  options.max_new_tokens = 120;
  const Generation answer = generate(*engine->continue_from(*context), prompt, {}, options);
  ASSERT_EQ(answer.tokens.size(), 120U);
  EXPECT_EQ(generate(*engine->continue_from(*context), prompt, {}, options).tokens, answer.tokens);

  // By hand, from the logits on the host.
  const std::unique_ptr<Continuation> by_hand = engine->continue_from(*context);
  by_hand->extend(prompt);
  for (const int32_t token : answer.tokens) {
    const std::span<const float> logits = by_hand->logits();
    ASSERT_EQ(std::max_element(logits.begin(), logits.end()) - logits.begin(), token);
    by_hand->extend(std::span(&token, 1));
  }

  // Sampling draws from the seed alone.
  options.temperature = 1;
  options.top_p = 0.9;
  const auto sample = [&](uint64_t seed) {
    options.seed = seed;
    return generate(*engine->continue_from(*context), prompt, {}, options).tokens;
  };
  const std::vector<int32_t> first = sample(1);
  EXPECT_EQ(sample(1), first);
  EXPECT_NE(sample(2), first);
}

TEST_F(CudaEngineTest, RandomWeightsDependOnTheSeedAlone) {
  const ModelConfig config = shape();
  const LandmarkWeights landmarks{1, {}};
  const auto embedding_of = [&](uint64_t seed) {
    const DeviceWeights weights =
        random_device_weights(config, landmarks, seed, Precision::kBf16, device().compute());
    return floats_of(weights.embedding.data(), config.vocabulary * config.hidden, device().compute());
  };
  const std::vector<float> values = embedding_of(7);
  EXPECT_EQ(embedding_of(7), values);
  EXPECT_NE(embedding_of(8), values);
  double squares = 0;
  for (const float value : values)
    squares += static_cast<double>(value) * value;
  // The spread of random_weights(): 1 / sqrt(inputs), within five standard errors of an estimate from so
  // many.
  const auto count = static_cast<double>(values.size());
  EXPECT_NEAR(std::sqrt(squares / count * static_cast<double>(config.hidden)), 1,
              5 / std::sqrt(2 * count) + 0x1p-8);
}

TEST_F(CudaEngineTest, WeightsThatDoNotFitAreSaidBeforeTheyAreLoaded) {
  ModelConfig config = shape();
  config.layers = 4096;
  config.hidden = config.ffn = 1 << 16;
  const std::unique_ptr<Engine> engine = made(config);
  try {
    engine->load_weights({std::nullopt, 3, {1, {}}});
    FAIL() << "weights of petabytes were loaded";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("the weights need"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("run.precision: int8 or fp8"), std::string::npos)
        << error.what();
  }
  const std::unique_ptr<Engine> in_fp8 = made(config, Precision::kFp8);
  try {
    in_fp8->load_weights({std::nullopt, 3, {1, {}}, {1, 2, 3}});
    FAIL() << "weights of petabytes were loaded";
  } catch (const UserError& error) {
    const int64_t for_a_while = loading_bytes(config, Precision::kFp8, 3) / 1'000'000;
    EXPECT_NE(std::string(error.what()).find(text(for_a_while, " of these only while they are loaded")),
              std::string::npos)
        << error.what();
  }
}

TEST_F(CudaEngineTest, LoadingTakesNoMoreMemoryThanIsAskedForAtFirst) {
  if (device().info().major < 9) GTEST_SKIP() << "weights in eight bits need compute capability 9.0";
  ModelConfig config = shape();
  config.layers = 4;
  config.hidden = 1024;
  config.heads = 16;
  config.kv_heads = 4;
  config.ffn = 4096;
  const std::vector<int32_t> tokens(3000, 7);
  for (const Precision precision : {Precision::kFp8, Precision::kInt8}) {
    SCOPED_TRACE(name_of(precision));
    const int64_t before = memory_pool().use().used_bytes;
    memory_pool().reset_high_marks();
    const DeviceWeights weights =
        random_device_weights(config, {1, {}}, 3, precision, device().compute(), tokens);
    const int64_t taken = memory_pool().use().used_high_bytes - before,
                  stays = device_weights_bytes(config, precision, 1),
                  for_a_while = loading_bytes(config, precision, 3000);
    EXPECT_LE(taken, stays + for_a_while + (int64_t{1} << 20));  // small arrays, and the pool's rounding
    EXPECT_GE(taken, stays + for_a_while / 2);                   // nor is much asked for that is not used
  }
}

TEST(DeviceShape, WhatAnFp8ModelLeavesInBf16IsASmallShare) {
  ModelConfig config;
  config.layers = 32;
  config.hidden = 4096;
  config.ffn = 14336;
  config.heads = 32;
  config.kv_heads = 8;
  config.head_dim = 128;
  config.vocabulary = 128;
  const auto form = [&](MatrixKind kind, int64_t layer) {
    return matrix_form(config, Precision::kFp8, kind, layer);
  };
  EXPECT_EQ(form(MatrixKind::kKv, 7), Precision::kBf16);
  EXPECT_EQ(form(MatrixKind::kDown, 0), Precision::kBf16);
  EXPECT_EQ(form(MatrixKind::kDown, 31), Precision::kBf16);
  EXPECT_EQ(form(MatrixKind::kGateUp, 0), Precision::kFp8);
  EXPECT_EQ(form(MatrixKind::kGateUp, 31), Precision::kBf16);
  EXPECT_EQ(form(MatrixKind::kGateUp, 30), Precision::kFp8);
  EXPECT_EQ(form(MatrixKind::kQ, 0), Precision::kFp8);
  EXPECT_EQ(matrix_form(config, Precision::kInt8, MatrixKind::kKv, 7), Precision::kInt8);
  // Of 13 D^2 numbers a layer (q and o D^2 each, kv D^2 / 2, the MLP 10.5 D^2): 0.5 each, 10.5 and 3.5 once.
  EXPECT_DOUBLE_EQ(bf16_share_of_fp8(config), (32 * 0.5 + 10.5 + 3.5) / (32 * 13));
  // What stays has two bytes a number, what does not one, four a row, two a number of mean and bias, and of
  // 128 outliers four, and one more a row.
  const int64_t in_bf16 = device_weights_bytes(config, Precision::kBf16, 0),
                in_fp8 = device_weights_bytes(config, Precision::kFp8, 0);
  const auto saved = [](int64_t out, int64_t in, int64_t outliers) {
    return out * in - 4 * out - 2 * (in + out) - outliers * (4 + out);
  };
  const int64_t d = config.hidden, f = config.ffn;
  EXPECT_EQ(in_bf16 - in_fp8, 32 * 2 * saved(d, d, 128) + 31 * saved(2 * f, d, 128) + 30 * saved(d, f, 0));
  config.layers = 1;  // as `bench layer` has
  EXPECT_EQ(form(MatrixKind::kDown, 0), Precision::kFp8);
}

TEST(DeviceShape, WhatTheKernelsDoNotTakeIsRefusedByName) {
  ModelConfig config = device_test_shape(64);
  EXPECT_FALSE(device_shape_objection(config, Precision::kBf16, "config.json"));
  config.ffn = 200;  // a multiple of 8, not of 16
  EXPECT_FALSE(device_shape_objection(config, Precision::kBf16, "config.json"));
  ASSERT_TRUE(device_shape_objection(config, Precision::kFp8, "config.json"));
  EXPECT_NE(std::string(device_shape_objection(config, Precision::kFp8, "config.json")->what())
                .find("intermediate_size"),
            std::string::npos);
  config.ffn = 208;  // a multiple of 16, not of 64
  EXPECT_FALSE(device_shape_objection(config, Precision::kFp8, "config.json"));
  ASSERT_TRUE(device_shape_objection(config, Precision::kInt8, "config.json"));
  EXPECT_NE(std::string(device_shape_objection(config, Precision::kInt8, "config.json")->what())
                .find("a multiple of 64, 133120 at most; set run.precision: bf16"),
            std::string::npos);
  config.ffn = 133120 + 64;
  EXPECT_FALSE(device_shape_objection(config, Precision::kFp8, "config.json"));
  EXPECT_TRUE(device_shape_objection(config, Precision::kInt8, "config.json"));
  config.ffn = 133120;
  EXPECT_FALSE(device_shape_objection(config, Precision::kInt8, "config.json"));
  config.ffn = 100;  // not a multiple of 8
  ASSERT_TRUE(device_shape_objection(config, Precision::kFp8, "config.json"));
  EXPECT_NE(std::string(device_shape_objection(config, Precision::kFp8, "config.json")->what())
                .find("set run.device: cpu and no run.precision"),
            std::string::npos);
  config.head_dim = 80;
  EXPECT_TRUE(device_shape_objection(config, Precision::kBf16, "config.json"));
}

}  // namespace
}  // namespace longhalo::testing

// The model on GPUs, over one to three ranks (which share a GPU where there are fewer), against the fp64
// reference over the whole sequence: hidden states, scores, embeddings, and going on from the context. Shards
// of 128 tokens, windows and strides so small that every path is taken.
#include "device_model_fixture.hpp"
#include "kernels/matmul/matmul.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "model/prefill.hpp"

namespace longhalo::testing {
namespace {

using test::made_by_root;
using test::random_tokens;
using test::relative_error;
using test::session;

constexpr int64_t kTile = 80;  // not a multiple of a kernel's tile

std::vector<double> reference_logits(const Weights& weights, std::span<const double> hidden) {
  const ModelConfig& c = weights.config;
  const auto n = static_cast<int64_t>(hidden.size()) / c.hidden;
  const std::vector<double> head(weights.head(), weights.head() + c.vocabulary * c.hidden);
  std::vector<double> logits(static_cast<size_t>(n * c.vocabulary));
  matmul_reference(n, c.vocabulary, c.hidden, hidden.data(), head.data(), logits.data());
  return logits;
}

// Every row by itself too: one that misses its halo would drown in the others.
void expect_close(std::span<const float> own, std::span<const double> expected, int64_t width, double bound) {
  EXPECT_LE(relative_error(own, expected), bound);
  for (size_t at = 0; at < own.size(); at += static_cast<size_t>(width)) {
    const double error = relative_error(own.subspan(at, static_cast<size_t>(width)),
                                        expected.subspan(at, static_cast<size_t>(width)));
    EXPECT_LE(error, kOfOneRow * bound) << "row " << at / static_cast<size_t>(width);
    if (!(error <= kOfOneRow * bound)) break;
  }
}

class DevicePrefillTest : public DeviceModelTest,
                          public ::testing::WithParamInterface<std::pair<int64_t, int64_t>> {
 protected:
  static void expect_scores(std::span<const float> scores, std::span<const int32_t> tokens,
                            std::span<const double> logits, int64_t vocabulary, double bound) {
    ASSERT_EQ(scores.size(), tokens.size());
    EXPECT_EQ(scores[0], 0);
    double worst = 0;
    for (size_t i = 1; i < scores.size(); ++i) {
      const double* row = logits.data() + (i - 1) * static_cast<size_t>(vocabulary);
      double sum = 0;
      for (int64_t v = 0; v < vocabulary; ++v)
        sum += std::exp(row[v]);
      const double error = std::abs(scores[i] - (row[tokens[i]] - std::log(sum)));
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
    // Logits of a random model spread by about one, so a row's relative error is a logit's absolute one; the
    // largest of some hundred is within twice the row's bound.
    EXPECT_LE(worst, 2 * kOfOneRow * bound);
  }

  static void expect_embeddings(std::span<const float> means, std::span<const double> hidden, int64_t tokens,
                                int64_t width, int64_t chunk, int64_t opening, double bound) {
    std::vector<double> expected;
    for (int64_t begin = opening; begin < tokens; begin += chunk) {
      const int64_t end = std::min(tokens, begin + chunk);
      for (int64_t e = 0; e < width; ++e) {
        double sum = 0;
        for (int64_t t = begin; t < end; ++t)
          sum += hidden[static_cast<size_t>(t * width + e)];
        expected.push_back(sum / static_cast<double>(end - begin));
      }
    }
    EXPECT_LE(relative_error(means, std::span<const double>(expected)), bound);
  }
};

TEST_P(DevicePrefillTest, AgreesWithTheReference) {
  const auto [tokens, head_dim] = GetParam();
  for (const PatternCase& test : pattern_cases()) {
    SCOPED_TRACE(test.name);
    const ModelConfig c = device_test_shape(head_dim);
    const Weights host = host_weights(c, test.pattern, 7);
    const DeviceWeights weights = on_device(host, test.pattern, Precision::kBf16);
    const std::vector<int32_t> document = random_tokens(tokens, c.vocabulary, 11);
    const std::vector<int32_t> more = random_tokens(90, c.vocabulary, 12);
    std::vector<int32_t> all = document;
    all.insert(all.end(), more.begin(), more.end());
    const std::vector<double> hidden =
        made_by_root<double>([&] { return test::reference_hidden(host, test.pattern, all); });
    const double bound = bf16_bound(c);

    poison_free_memory();
    const ShardPlan shards(tokens, session().ranks(), shard_alignment(test.pattern.strides()));
    DevicePrefill prefill(room(), weights, test.pattern, shards, kTile);
    int64_t last_done = 0, in_all = 0;
    std::optional<DeviceContext> context =
        prefill.run(document, KeepContext::kYes, [&](int64_t done, int64_t total) {
          EXPECT_GE(done, last_done);
          last_done = done;
          in_all = total;
        });
    EXPECT_EQ(last_done, in_all) << "progress ends where it should";
    ASSERT_TRUE(context);
    EXPECT_EQ(context->position(), tokens);
    EXPECT_NO_THROW(require_finite(prefill));

    const TokenRange shard = prefill.shard();
    const std::vector<float> own = hidden_of(prefill);
    expect_close(own, std::span(hidden).subspan(static_cast<size_t>(shard.begin * c.hidden), own.size()),
                 c.hidden, bound);

    const std::vector<double> logits = made_by_root<double>([&] { return reference_logits(host, hidden); });
    const std::vector<float> scores = score_tokens(session(), prefill, shards, document);
    const int64_t opening = std::min<int64_t>(tokens - 1, 37);
    const std::vector<float> chunks = embed_chunks(session(), prefill, shards, 100, opening);
    if (session().is_root()) {
      expect_scores(scores, document, logits, c.vocabulary, bound);
      expect_embeddings(chunks, hidden, tokens, c.hidden, 100, opening, bound);
    } else {
      EXPECT_TRUE(scores.empty() && chunks.empty());
    }

    // Every rank goes on from the same context: in portions of many tokens, of few, and token by token, past
    // the point where the context's memory moves.
    DeviceDecoder decoder(weights, test.pattern, 32, matmul(), stream());
    const auto vocabulary = static_cast<size_t>(c.vocabulary);
    const auto logits_at = [&](size_t token) {
      return std::span<const double>(logits).subspan((static_cast<size_t>(tokens) + token) * vocabulary,
                                                     vocabulary);
    };
    DecodedContext portions(context->clone(stream()));
    decoder.extend(portions, std::span(more).first(45));
    EXPECT_LE(relative_error(decoder.logits(), logits_at(44)), kOfOneRow * bound);
    decoder.extend(portions, std::span(more).subspan(45, 5));
    EXPECT_LE(relative_error(decoder.logits(), logits_at(49)), kOfOneRow * bound);
    DecodedContext steps(std::move(*context));
    for (size_t i = 0; i < more.size(); ++i) {
      decoder.extend(steps, std::span(more).subspan(i, 1));
      const double error = relative_error(decoder.logits(), logits_at(i));
      EXPECT_LE(error, kOfOneRow * bound) << "token " << i << " after the document";
      if (!(error <= kOfOneRow * bound)) break;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(LengthAndHeadDim, DevicePrefillTest,
                         ::testing::Values(std::pair<int64_t, int64_t>{1, 64},
                                           std::pair<int64_t, int64_t>{129, 128},
                                           std::pair<int64_t, int64_t>{300, 64},
                                           std::pair<int64_t, int64_t>{897, 128},
                                           std::pair<int64_t, int64_t>{897, 64}));

class DeviceModel : public DeviceModelTest {
 protected:
  const AttentionPattern pattern_ = AttentionPattern::window_and_landmarks(100, 8);
  const ModelConfig config_ = device_test_shape(64);
  const std::vector<int32_t> document_ = random_tokens(771, config_.vocabulary, 31);
};

TEST_F(DeviceModel, AgreesWithTheCpuAndWithOneRank) {
  const Weights host = host_weights(config_, pattern_, 5);
  const DeviceWeights weights = on_device(host, pattern_, Precision::kBf16);
  const ShardPlan shards(771, session().ranks(), shard_alignment(pattern_.strides()));
  DevicePrefill together(room(), weights, pattern_, shards, kTile);
  together.run(document_, KeepContext::kNo);
  const std::vector<float> own = hidden_of(together);
  const TokenRange shard = together.shard();

  Prefill cpu(session(), host, pattern_, shards, kTile);
  cpu.run(document_, KeepContext::kNo);
  std::vector<float> of_cpu(own.size());
  final_norm(host, shard.size(), cpu.residual(), of_cpu.data());
  EXPECT_LE(relative_error(own, std::span<const float>(of_cpu)), bf16_bound(config_));

  const MpiSession self(MPI_COMM_SELF);
  const std::unique_ptr<Transport> no_messages =
      make_transport(self, TransportChoice::kStaged, device().info()).transport;
  const ShardPlan whole(771, 1, shard_alignment(pattern_.strides()));
  DevicePrefill alone({device(), *no_messages, matmul()}, weights, pattern_, whole, kTile);
  alone.run(document_, KeepContext::kNo);
  const std::vector<float> of_one = hidden_of(alone);
  EXPECT_LE(relative_error(own, std::span<const float>(of_one).subspan(
                                    static_cast<size_t>(shard.begin * config_.hidden), own.size())),
            bf16_bound(config_));
}

TEST_F(DeviceModel, RepeatsBitForBit) {
  const DeviceWeights weights = on_device(host_weights(config_, pattern_, 5), pattern_, Precision::kBf16);
  const ShardPlan shards(771, session().ranks(), shard_alignment(pattern_.strides()));
  std::vector<std::vector<float>> hidden, logits;
  for (int repeat = 0; repeat < 3; ++repeat) {  // the first chooses how products are made, for all
    poison_free_memory();
    DevicePrefill prefill(room(), weights, pattern_, shards, kTile);
    DecodedContext state(std::move(*prefill.run(document_, KeepContext::kYes)));
    hidden.push_back(hidden_of(prefill));
    DeviceDecoder decoder(weights, pattern_, 32, matmul(), stream());
    decoder.extend(state, std::span(document_).first(40));
    logits.emplace_back(decoder.logits().begin(), decoder.logits().end());
  }
  EXPECT_EQ(hidden[1], hidden[0]);
  EXPECT_EQ(hidden[2], hidden[0]);
  EXPECT_EQ(logits[1], logits[0]);
  EXPECT_EQ(logits[2], logits[0]);
}

TEST_F(DeviceModel, AGraphGivesTheBitsOfItsKernels) {
  const DeviceWeights weights = on_device(host_weights(config_, pattern_, 6), pattern_, Precision::kBf16);
  DeviceDecoder with(weights, pattern_, 16, matmul(), stream(), UseGraphs::kYes);
  DeviceDecoder without(weights, pattern_, 16, matmul(), stream(), UseGraphs::kNo);
  DecodedContext replayed(DeviceContext(config_, pattern_, stream()));
  DecodedContext queued(DeviceContext(config_, pattern_, stream()));
  bool captured = false;
  int64_t moves = 0;
  for (size_t i = 0; i < 400; ++i) {  // landmarks complete and memory moves several times
    const int64_t first = replayed.context.exact().first();
    with.extend(replayed, std::span(document_).subspan(i, 1));
    without.extend(queued, std::span(document_).subspan(i, 1));
    captured = captured || !replayed.graph.empty();
    moves += replayed.context.exact().first() != first ? 1 : 0;
    const std::span<const float> a = with.logits(), b = without.logits();
    ASSERT_TRUE(std::equal(a.begin(), a.end(), b.begin())) << "token " << i;
    ASSERT_EQ(with.most_likely(), without.most_likely());
    ASSERT_EQ(with.most_likely(), std::max_element(a.begin(), a.end()) - a.begin());
  }
  EXPECT_TRUE(captured);
  EXPECT_TRUE(queued.graph.empty());
  EXPECT_GE(moves, 2);
}

TEST_F(DeviceModel, TheContextStaysSmall) {
  const DeviceWeights weights = on_device(host_weights(config_, pattern_, 6), pattern_, Precision::kBf16);
  DeviceDecoder decoder(weights, pattern_, 16, matmul(), stream());
  DecodedContext state(DeviceContext(config_, pattern_, stream()));
  decoder.extend(state, document_);
  EXPECT_EQ(state.context.position(), 771);
  const int64_t row = 4 * config_.kv_size(), rows = state.context.bytes() / row / config_.layers;
  EXPECT_GE(rows, 100 + 771 / 8);
  EXPECT_LE(rows, 100 + 64 + 16 + 771 / 8 + 2 + 1);  // slack, a tile, and the pooling states
}

// Five products of a layer shape what it adds to the residual stream (queries; keys and values; output; gate
// and up; down), and what the layers add is independent too. fp8 rounds both operands of a product to 2^-4 of
// themselves. int8 rounds them to half of 1/127 of a row's largest, which after the rotation of rows whose
// blocks are alike is below eight times the row's root mean square: to 2^-5 of that at most.
TEST_F(DeviceModel, EightBitsAreCloseButNotTheSame) {
  if (device().info().major < 9) GTEST_SKIP() << "fp8 products need compute capability 9.0";
  std::vector<Precision> precisions{Precision::kBf16, Precision::kFp8};
  if (device().info().is_hopper()) precisions.push_back(Precision::kInt8);
  const double products = std::sqrt(2.0 * 5);  // operands, products
  const double bounds[] = {0, 0x1p-4 * products, 0x1p-5 * products};
  const Weights host = host_weights(config_, pattern_, 5);
  const std::vector<double> hidden =
      made_by_root<double>([&] { return test::reference_hidden(host, pattern_, document_); });
  const ShardPlan shards(771, session().ranks(), shard_alignment(pattern_.strides()));
  std::vector<double> errors;
  for (const Precision precision : precisions) {
    const DeviceWeights weights = on_device(host, pattern_, precision);
    poison_free_memory();
    DevicePrefill prefill(room(), weights, pattern_, shards, kTile);
    DecodedContext state(std::move(*prefill.run(document_, KeepContext::kYes)));
    const std::vector<float> own = hidden_of(prefill);
    errors.push_back(relative_error(
        own,
        std::span(hidden).subspan(static_cast<size_t>(prefill.shard().begin * config_.hidden), own.size())));
    DeviceDecoder decoder(weights, pattern_, 32, matmul(), stream());
    decoder.extend(state, std::span(document_).first(20));
    EXPECT_NO_THROW(decoder.most_likely());
  }
  for (size_t eight = 1; eight < errors.size(); ++eight) {
    EXPECT_LE(errors[eight], bounds[eight]);
    if (session().is_root()) {
      EXPECT_GT(errors[eight], errors[0]);
    }
  }
  if (errors.size() > 2) {
    EXPECT_LT(errors[2], errors[1]);
  }
}

// Embeddings that have much in common, as what a trained model's layers read has.
TEST_F(DeviceModel, MeansAreThoseOfTheTokensAndMakeFp8MoreExact) {
  if (device().info().major < 9) GTEST_SKIP() << "fp8 products need compute capability 9.0";
  Weights host = host_weights(config_, pattern_, 5);
  const int64_t hidden_size = config_.hidden;
  for (int64_t token = 0; token < config_.vocabulary; ++token) {
    for (int64_t c = 0; c < hidden_size; ++c) {
      float& x = host.embedding[token * hidden_size + c];
      x = to_float(to_bfloat16(x + (c % 2 == 0 ? 0.5F : -0.5F)));
    }
  }
  const std::span<const int32_t> tokens = std::span(document_).first(300);
  const DeviceWeights centred = on_device(host, pattern_, Precision::kFp8, tokens);
  const DeviceWeights plain = on_device(host, pattern_, Precision::kFp8);

  // What the first queries are made of, from their definition: all but the first four tokens count.
  std::vector<double> mean(static_cast<size_t>(hidden_size)), normed(mean.size());
  const DeviceMatrix& q = centred.layers.front().q;
  for (const int32_t token : tokens.subspan(4)) {
    const std::vector<double> row(host.embedding.data() + token * hidden_size,
                                  host.embedding.data() + (token + 1) * hidden_size);
    const auto& norm = host.layers.front().attention_norm;
    const std::vector<double> weight(norm.data(), norm.data() + hidden_size);
    rmsnorm_reference(1, hidden_size, row.data(), weight.data(), config_.rms_norm_epsilon, normed.data());
    for (size_t c = 0; c < mean.size(); ++c)
      mean[c] += normed[c] / 296;
  }
  // A mean of numbers in bf16, rounded to bf16.
  EXPECT_LE(test::relative_error(floats_of(q.mean.data(), hidden_size, stream()), mean), 0x1p-8);
  double largest = 0;
  for (const double x : mean)
    largest = std::max(largest, std::abs(x));
  EXPECT_NEAR(q.largest_mean, largest, 0x1p-7 * largest);
  std::vector<double> bias(static_cast<size_t>(q.out));
  for (int64_t o = 0; o < q.out; ++o)
    for (int64_t c = 0; c < hidden_size; ++c)
      bias[static_cast<size_t>(o)] +=
          mean[static_cast<size_t>(c)] * static_cast<double>(host.layers.front().q[o * hidden_size + c]);
  EXPECT_LE(test::relative_error(floats_of(q.bias.data(), q.out, stream()), bias), 0x1p-7);
  EXPECT_EQ(plain.layers.front().q.mean.size(), 0);
  EXPECT_EQ(q.outliers.size(), fp8_outliers(config_, MatrixKind::kQ));
  EXPECT_EQ(q.fp8.size(), q.out * (q.in + q.outliers.size()));
  EXPECT_TRUE(centred.layers.front().down.outliers.empty() && plain.layers.front().q.outliers.empty());
  const DeviceMatrix& kv = centred.layers.front().kv;
  EXPECT_EQ(kv.form(), Precision::kBf16);
  EXPECT_TRUE(kv.mean.empty() && kv.bias.empty());

  const std::vector<double> hidden =
      made_by_root<double>([&] { return test::reference_hidden(host, pattern_, document_); });
  const ShardPlan shards(771, session().ranks(), shard_alignment(pattern_.strides()));
  const auto error_of = [&](const DeviceWeights& weights) {
    DevicePrefill prefill(room(), weights, pattern_, shards, kTile);
    prefill.run(document_, KeepContext::kNo);
    const std::vector<float> own = hidden_of(prefill);
    const auto begin = static_cast<size_t>(prefill.shard().begin * hidden_size);
    return test::relative_error(own, std::span(hidden).subspan(begin, own.size()));
  };
  const double with = error_of(centred), without = error_of(plain);
  if (session().is_root()) {
    std::cout << "relative error in fp8: " << with << " with means, " << without << " without\n";
    EXPECT_LT(with, 0.8 * without);
  }
}

TEST_F(DeviceModel, HiddenStatesThatAreNotFiniteAreRefusedByToken) {
  Weights host = host_weights(config_, pattern_, 5);
  const int32_t bad = document_[400];
  for (int64_t c = 0; c < config_.hidden; ++c)
    host.embedding[bad * config_.hidden + c] = 0x1p100F;  // finite, but its square is not
  const DeviceWeights weights = on_device(host, pattern_, Precision::kBf16);
  const ShardPlan shards(771, session().ranks(), shard_alignment(pattern_.strides()));
  DevicePrefill prefill(room(), weights, pattern_, shards, kTile);
  prefill.run(document_, KeepContext::kNo);
  const auto first =
      std::find(document_.begin() + prefill.shard().begin, document_.begin() + prefill.shard().end, bad);
  const bool has_one = first != document_.begin() + prefill.shard().end;
  try {
    require_finite(prefill);
    EXPECT_FALSE(has_one);
  } catch (const UserError& error) {
    EXPECT_TRUE(has_one);
    EXPECT_NE(std::string(error.what()).find("token " + std::to_string(first - document_.begin())),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace longhalo::testing

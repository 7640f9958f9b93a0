// Training on GPUs, over one to three ranks (which share a GPU where there are fewer): loss and gradients
// against the CPU's on one rank, in fp32. Shards of 128 tokens, windows and strides so small that every path
// is taken: halos, landmarks of other ranks, documents that end inside windows, segments and shards.
#include "device_model_fixture.hpp"
#include "kernels/matmul/matmul.hpp"
#include "model/device_training_pass.hpp"
#include "model/parameters.hpp"

namespace longhalo::testing {
namespace {

using test::random_tokens;
using test::session;

struct Sequence {
  Sequence(int64_t count, int64_t vocabulary, const std::vector<int64_t>& begins, uint64_t seed)
      : tokens(random_tokens(count, vocabulary, seed)),
        labels(tokens.size(), kIgnoredLabel),
        doc_start(tokens.size()) {
    for (size_t d = 0; d < begins.size(); ++d) {
      const int64_t end = d + 1 < begins.size() ? begins[d + 1] : count;
      for (int64_t i = begins[d]; i < end; ++i) {
        doc_start[static_cast<size_t>(i)] = begins[d];
        if (i + 1 < end) labels[static_cast<size_t>(i)] = tokens[static_cast<size_t>(i) + 1];
      }
    }
  }
  TrainingSequence view() const { return {tokens, labels, doc_start}; }
  std::vector<int32_t> tokens, labels;
  std::vector<int64_t> doc_start;
};

struct TrainingCase {
  std::string name;
  AttentionPattern pattern;
  int64_t tokens, head_dim;
  std::vector<int64_t> documents;
  bool tied = true;
};

std::vector<TrainingCase> training_cases() {
  return {
      {"window and landmarks", AttentionPattern::window_and_landmarks(100, 8), 385, 64, {0}},
      {"packed documents",
       AttentionPattern::window_and_landmarks(60, 16),
       401,
       128,
       {0, 1, 90, 201, 202, 330},
       false},
      {"window over several shards", AttentionPattern::window_and_landmarks(300, 32), 383, 64, {0, 170}},
      {"four scales", {{{1, 0, 40}, {4, 40, 128}, {16, 128, 256}, {64, 256, kUnlimited}}}, 399, 64, {0, 33}},
      {"window alone", AttentionPattern::window_and_landmarks(50, 0), 130, 128, {0}},
  };
}

class DeviceTraining : public DeviceModelTest {
 protected:
  static constexpr double kScale = 1.0 / 256, kZLoss = 1e-3;

  static ModelConfig config_of(const TrainingCase& test) {
    ModelConfig config = device_test_shape(test.head_dim);
    config.layers = 3;
    config.tied_embeddings = test.tied;
    return config;
  }
  struct Gradients {
    LossSums loss;
    std::vector<float> all;  // of all ranks
  };
  static Gradients run(const TrainingCase& test, const DeviceWeights& weights, const Sequence& sequence,
                       const DeviceTrainingOptions& options) {
    const ShardPlan shards(test.tokens, session().ranks(), shard_alignment(test.pattern.strides()));
    DeviceGradients gradients(weights, stream());
    gradients.clear(stream());
    poison_free_memory();
    DeviceTrainingPass pass(room(), weights, gradients, test.pattern, shards, options);
    std::vector<int64_t> done;
    const LossSums own = pass.forward_backward(sequence.view(), kScale, kZLoss,
                                               [&](int64_t elements) { done.push_back(elements); });
    EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
    EXPECT_EQ(done.size(), static_cast<size_t>(weights.config.layers) + 2);
    EXPECT_EQ(done.back(), gradients.elements());
    Gradients result{own.over_ranks(session()),
                     std::vector<float>(static_cast<size_t>(gradients.elements()))};
    to_host<float>(result.all, gradients.data(), stream());
    check_mpi(MPI_Allreduce(MPI_IN_PLACE, result.all.data(), static_cast<int>(result.all.size()), MPI_FLOAT,
                            MPI_SUM, session().comm()),
              "MPI_Allreduce");
    const LossSums alone = pass.evaluate(sequence.view()).over_ranks(session());
    EXPECT_TRUE(alone.cross_entropy == result.loss.cross_entropy || std::isnan(result.loss.cross_entropy));
    return result;
  }
};

TEST_F(DeviceTraining, GradientsAreThoseOfTheCpu) {
  for (const TrainingCase& test : training_cases()) {
    SCOPED_TRACE(test.name);
    const ModelConfig config = config_of(test);
    const Weights host = host_weights(config, test.pattern, 5);
    const Sequence sequence(test.tokens, config.vocabulary, test.documents, 6);
    const MpiSession self(MPI_COMM_SELF);
    Weights expected = zeros_like(host);
    TrainingPass cpu(self, host, expected, test.pattern,
                     ShardPlan(test.tokens, 1, shard_alignment(test.pattern.strides())), 64);
    const LossSums loss = cpu.forward_backward(sequence.view(), kScale, kZLoss, {});

    const DeviceWeights weights = on_device(host, test.pattern, Precision::kBf16);
    DeviceTrainingOptions options;
    options.tile = 80;  // not a multiple of a kernel's tile
    const Gradients got = run(test, weights, sequence, options);
    EXPECT_EQ(got.loss.tokens, loss.tokens);
    // Logits of a random model spread by about one, so a row's relative error is a logit's absolute one.
    EXPECT_NEAR(got.loss.cross_entropy, loss.cross_entropy,
                bf16_bound(config) * static_cast<double>(loss.tokens));

    // Beside the forward pass's roundings (bf16_bound) those of the backward pass: in the MLP four results
    // and the stream's, in attention out (in D), weights, scores' gradients, dq, their turn, the normed
    // input's twice, keys' and the stream's: fourteen a layer, and three of the loss.
    const double bound = 0x1p-8 * std::sqrt((12.0 + 14.0) * static_cast<double>(config.layers) + 4);
    size_t at = 0;
    for (const Parameter& parameter : parameters_of(expected)) {
      const auto part = std::span<const float>(got.all).subspan(at, parameter.values.size());
      // A vector's elements are sums over all tokens in which much cancels: they stray as rows do.
      const bool vector = parameter.decay == Decay::kNo;
      EXPECT_LE(test::relative_error(part, std::span<const float>(parameter.values)),
                (vector ? kOfOneRow : 1) * bound)
          << parameter.name;
      at += parameter.values.size();
    }
    EXPECT_EQ(at, got.all.size());
  }
}

TEST_F(DeviceTraining, IsTheSameToTheLastBitOnARepeatAndWhateverIsKept) {
  for (const TrainingCase& test : training_cases()) {
    SCOPED_TRACE(test.name);
    const ModelConfig config = config_of(test);
    const DeviceWeights weights =
        on_device(host_weights(config, test.pattern, 7), test.pattern, Precision::kBf16);
    const Sequence sequence(test.tokens, config.vocabulary, test.documents, 8);
    std::vector<Gradients> results;
    for (const int64_t every : {1, 1, 2, 3, 8}) {  // the first chooses how products are made, for all
      DeviceTrainingOptions options;
      options.tile = 96, options.every = every;
      results.push_back(run(test, weights, sequence, options));
    }
    for (const Gradients& result : results) {
      EXPECT_EQ(result.loss.cross_entropy, results[0].loss.cross_entropy);
      EXPECT_EQ(result.loss.z, results[0].loss.z);
      EXPECT_EQ(result.all, results[0].all);
    }
  }
}

TEST_F(DeviceTraining, WhatIsNotFiniteIsSeenInLossAndGradients) {
  const TrainingCase test = training_cases()[0];
  const ModelConfig config = config_of(test);
  DeviceWeights weights = on_device(host_weights(config, test.pattern, 5), test.pattern, Precision::kBf16);
  const Sequence sequence(test.tokens, config.vocabulary, test.documents, 6);
  check_cuda(
      cudaMemsetAsync(weights.embedding.data() + sequence.tokens[200] * config.hidden, 0xff, 2, stream()),
      "one NaN");
  const Gradients got = run(test, weights, sequence, {});
  EXPECT_FALSE(std::isfinite(got.loss.cross_entropy));
  EXPECT_FALSE(std::all_of(got.all.begin(), got.all.end(), [](float x) { return std::isfinite(x); }));
}

}  // namespace
}  // namespace longhalo::testing

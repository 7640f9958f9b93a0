// Training on GPUs, over one to three ranks (which share a GPU where there are fewer): loss and gradients
// against the CPU's on one rank, in fp32. Shards of 128 tokens, windows and strides so small that every path
// is taken: halos, landmarks of other ranks, documents that end inside windows, segments and shards.
#include "device_model_fixture.hpp"
#include "kernels/matmul/matmul.hpp"
#include "model/device_trainer.hpp"
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
  static Gradients run(const TrainingCase& test, DeviceWeights& weights, const Sequence& sequence,
                       const DeviceTrainingOptions& options) {
    const ShardPlan shards(test.tokens, session().ranks(), shard_alignment(test.pattern.strides()));
    DeviceGradients gradients(weights, weights.config.layers, stream());
    gradients.clear(stream());
    poison_free_memory();
    DeviceTrainingPass pass(room(), session(), weights, gradients, test.pattern, shards, options);
    std::vector<int64_t> begun, done, all_sections;
    for (int64_t section = 0; section < weights.config.layers + 2; ++section)
      all_sections.push_back(section);
    const LossSums own =
        pass.forward_backward(sequence.view(), kScale, kZLoss,
                              {[&](int64_t section) {
                                 EXPECT_EQ(std::count(done.begin(), done.end(), section), 0);
                                 begun.push_back(section);
                               },
                               [&](int64_t section) {
                                 EXPECT_EQ(std::count(begun.begin(), begun.end(), section), 1);
                                 done.push_back(section);
                               }});
    EXPECT_EQ(done, all_sections);
    Gradients result{own.over_ranks(session()), gradients.to_host(stream())};
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
    const ShardPlan whole(test.tokens, 1, shard_alignment(test.pattern.strides()));
    TrainingPass cpu(self, host, expected, test.pattern, whole, 64);
    const LossSums loss = cpu.forward_backward(sequence.view(), kScale, kZLoss, {});

    DeviceWeights weights = on_device(host, test.pattern, Precision::kBf16);
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
    DeviceWeights weights = on_device(host_weights(config, test.pattern, 7), test.pattern, Precision::kBf16);
    const Sequence sequence(test.tokens, config.vocabulary, test.documents, 8);
    const int64_t own = ShardPlan(test.tokens, session().ranks(), shard_alignment(test.pattern.strides()))
                            .shard(session().rank())
                            .size();
    std::vector<Gradients> results;
    for (const bool stores : {false, true}) {
      for (const double every :
           {1.0, 1.0, 1.5, 2.0, 3.0, 8.0}) {  // the first chooses how products are made, for all
        HostActivationStore store(
            device_stored_inputs_shape(KeptLayers(config.layers, every), own, config.hidden));
        DeviceTrainingOptions options;
        options.tile = 96, options.every = every, options.store = stores ? &store : nullptr;
        results.push_back(run(test, weights, sequence, options));
      }
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

DeviceTrainerOptions options_of_a_run() {
  DeviceTrainerOptions options;
  options.adamw.weight_decay = 0.1;
  options.schedule = {ScheduleShape::kCosine, 1e-3, 1e-4, 2, 0, 10};
  options.z_loss = 1e-3;
  options.pass.tile = 96;
  return options;
}

struct TrainedSteps {
  std::vector<StepResult> steps;
  double validated = 0;  // the loss of another sequence with the weights of the end
};

// The CPU's pass and update by hand, with what the GPU does to weights: masters in fp32, and matrices rounded
// to bf16 for each pass. (At this learning rate a step is about a unit in a weight's last place.)
class RoundingTrainer {
 public:
  RoundingTrainer(const TrainingCase& test, Weights weights, const DeviceTrainerOptions& options)
      : options_(options),
        weights_(std::move(weights)),
        gradients_(zeros_like(weights_)),
        whole_(test.tokens, 1, shard_alignment(test.pattern.strides())),
        pass_(self_, weights_, gradients_, test.pattern, whole_, 64) {
    for (const Parameter& parameter : parameters_of(weights_))
      master_.insert(master_.end(), parameter.values.begin(), parameter.values.end());
    m_.resize(master_.size());
    v_.resize(master_.size());
    round();
  }
  StepResult step(int64_t number, std::span<const TrainingSequence> sequences) {
    StepResult result;
    for (const TrainingSequence& sequence : sequences)
      result.counted_tokens += sequence.counted();
    const double scale = 1 / static_cast<double>(result.counted_tokens);
    std::vector<float> all;
    for (const Parameter& gradient : parameters_of(gradients_))
      std::fill(gradient.values.begin(), gradient.values.end(), 0.0F);
    for (const TrainingSequence& sequence : sequences) {
      const LossSums sums = pass_.forward_backward(sequence, scale, options_.z_loss, {});
      result.loss += (sums.cross_entropy + sums.z) * scale;
    }
    double squares = 0;
    for (const Parameter& gradient : parameters_of(gradients_)) {
      all.insert(all.end(), gradient.values.begin(), gradient.values.end());
      for (const float x : gradient.values)
        squares += static_cast<double>(x) * static_cast<double>(x);
    }
    result.gradient_norm = std::sqrt(squares);
    result.learning_rate = options_.schedule.rate(number);
    size_t at = 0;
    for (const Parameter& parameter : parameters_of(weights_)) {
      const size_t size = parameter.values.size();
      const auto part = [&](std::vector<float>& x) { return std::span(x).subspan(at, size); };
      adamw_update(options_.adamw, result.learning_rate,
                   parameter.decay == Decay::kYes ? options_.adamw.weight_decay : 0, number,
                   std::min(1.0, options_.clip / result.gradient_norm), part(all),
                   {part(master_), part(m_), part(v_)});
      at += size;
    }
    round();
    return result;
  }
  double validate(std::span<const TrainingSequence> sequences) {
    const LossSums sums = pass_.evaluate(sequences[0]);
    return sums.cross_entropy / static_cast<double>(sums.tokens);
  }

 private:
  void round() {
    copy_to_parameters(parameters_of(weights_), 0, master_);
    test::round_matrices_to_bfloat16(weights_);
  }
  const MpiSession self_{MPI_COMM_SELF};
  DeviceTrainerOptions options_;
  Weights weights_, gradients_;
  ShardPlan whole_;
  TrainingPass pass_;
  std::vector<float> master_, m_, v_;
};

// Some steps of two sequences each: gradients are accumulated, and layers take turns in their memory.
template <class AnyTrainer>
TrainedSteps train(AnyTrainer& trainer, const TrainingCase& test, int64_t vocabulary) {
  std::vector<Sequence> data;
  for (uint64_t seed = 1; seed <= 4; ++seed)
    data.emplace_back(test.tokens, vocabulary, test.documents, seed);
  TrainedSteps run;
  for (int64_t step = 1; step <= 6; ++step) {
    const auto at = static_cast<size_t>(step);
    const TrainingSequence sequences[2] = {data[at % 3].view(), data[(at + 1) % 3].view()};
    run.steps.push_back(trainer.step(step, sequences));
  }
  const TrainingSequence other[1] = {data[3].view()};
  run.validated = trainer.validate(other);
  return run;
}

TEST_F(DeviceTraining, StepsFollowThoseOfTheCpuAndRepeatBitForBit) {
  for (const TrainingCase& test : training_cases()) {
    SCOPED_TRACE(test.name);
    const ModelConfig config = config_of(test);
    const DeviceTrainerOptions options = options_of_a_run();
    const ShardPlan shards(test.tokens, session().ranks(), shard_alignment(test.pattern.strides()));
    std::vector<TrainedSteps> runs;
    for (int repeat = 0; repeat < 3; ++repeat) {  // the first chooses how products are made
      DeviceWeights weights =
          on_device(host_weights(config, test.pattern, 9), test.pattern, Precision::kBf16);
      poison_free_memory();
      DeviceTrainer trainer(room(), session(), weights, test.pattern, shards, options);
      runs.push_back(train(trainer, test, config.vocabulary));
    }
    RoundingTrainer cpu(test, host_weights(config, test.pattern, 9), options);
    const TrainedSteps expected = train(cpu, test, config.vocabulary);
    const double bound = bf16_bound(config);
    for (size_t step = 0; step < expected.steps.size(); ++step) {
      SCOPED_TRACE(step + 1);
      const StepResult &got = runs[0].steps[step], &right = expected.steps[step];
      EXPECT_FALSE(got.skipped);
      EXPECT_EQ(got.counted_tokens, right.counted_tokens);
      EXPECT_EQ(got.learning_rate, right.learning_rate);
      EXPECT_NEAR(got.loss, right.loss, bound);  // nats a token, as above
      EXPECT_NEAR(got.gradient_norm, right.gradient_norm, kOfOneRow * bound * right.gradient_norm);
      for (size_t repeat : {1, 2}) {
        EXPECT_EQ(runs[repeat].steps[step].loss, got.loss);
        EXPECT_EQ(runs[repeat].steps[step].gradient_norm, got.gradient_norm);
      }
    }
    EXPECT_NEAR(runs[0].validated, expected.validated, bound);
    EXPECT_EQ(runs[1].validated, runs[0].validated);
    EXPECT_LT(runs[0].steps.back().loss, runs[0].steps.front().loss);  // it learns
  }
}

TEST_F(DeviceTraining, AStepThatIsNotFiniteIsSkipped) {
  const TrainingCase test = training_cases()[0];
  const ModelConfig config = config_of(test);
  DeviceWeights weights = on_device(host_weights(config, test.pattern, 5), test.pattern, Precision::kBf16);
  const ShardPlan shards(test.tokens, session().ranks(), shard_alignment(test.pattern.strides()));
  DeviceTrainer trainer(room(), session(), weights, test.pattern, shards, options_of_a_run());
  const Sequence sequence(test.tokens, config.vocabulary, test.documents, 6);
  const TrainingSequence sequences[1] = {sequence.view()};
  const double before = trainer.validate(sequences);
  BFloat16* const value = weights.embedding.data() + sequence.tokens[200] * config.hidden;
  BFloat16 kept{};
  to_host<BFloat16>({&kept, 1}, value, stream());
  check_cuda(cudaMemsetAsync(value, 0xff, 2, stream()), "one NaN");
  EXPECT_TRUE(trainer.step(1, sequences).skipped);
  copy_async(value, static_cast<const BFloat16*>(&kept), 1, stream());
  EXPECT_EQ(trainer.validate(sequences), before);  // no weight has moved
  EXPECT_FALSE(trainer.step(2, sequences).skipped);
  EXPECT_LT(trainer.validate(sequences), before);
}

}  // namespace
}  // namespace longhalo::testing

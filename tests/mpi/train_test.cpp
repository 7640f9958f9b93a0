// Training over ranks: gradients against central differences of the fp64 reference, and whole runs against
// the same run on one rank. Shards of a few tokens take every path: windows over several ranks, ranks without
// tokens, landmarks that all later ranks see, documents that end inside windows, segments and shards.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "comm/shard_plan.hpp"
#include "kernels/matmul/matmul.hpp"
#include "model/trainer.hpp"
#include "support/mpi_main.hpp"
#include "support/reference_model.hpp"
#include "training_fixture.hpp"

namespace longhalo::test {
namespace {

// Each rank works out every so many-th element; all get all.
std::vector<double> central_differences(Weights& weights, const Case& test, const TrainingSequence& sequence,
                                        double z_loss) {
  const auto loss = [&] {
    return reference_loss(weights, test.pattern, sequence.tokens, sequence.labels, sequence.doc_start,
                          z_loss);
  };
  std::vector<double> gradients;
  for (const Parameter& parameter : parameters_of(weights)) {
    for (float& value : parameter.values) {
      double& gradient = gradients.emplace_back(0);
      if (gradients.size() % static_cast<size_t>(session().ranks()) != static_cast<size_t>(session().rank()))
        continue;
      // fp64 takes small steps: what is left out is of order step^2, what is rounded 1e-16 / step.
      const float kept = value;
      value = kept + 1.0F / 8192;
      const double up = value, loss_up = loss();
      value = kept - 1.0F / 8192;
      gradient = (loss_up - loss()) / (up - static_cast<double>(value));
      value = kept;
    }
  }
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, gradients.data(), static_cast<int>(gradients.size()), MPI_DOUBLE,
                          MPI_SUM, session().comm()),
            "MPI_Allreduce");
  return gradients;
}

TEST(Gradients, AreThoseOfTheReference) {
  set_kernel_threads(1);
  constexpr double kZLoss = 0.01;
  for (const Case& test : cases()) {
    SCOPED_TRACE(test.name);
    Weights weights = tiny_model(test.pattern, test.tied, 5);
    const Data data = make_data(test.tokens, weights.config.vocabulary, test.document_begins, 6);
    const TrainingSequence sequence = data.view();
    const std::vector<double> expected = central_differences(weights, test, sequence, kZLoss);
    const double expected_loss =
        reference_loss(weights, test.pattern, data.tokens, data.labels, data.doc_start, kZLoss);

    for (const int64_t tile : {5, 64}) {
      const ShardPlan shards(test.tokens, session().ranks(), test.alignment);
      Weights gradients = zeros_like(weights);
      TrainingPass pass(session(), weights, gradients, test.pattern, shards, tile);
      const LossSums sums = pass.forward_backward(sequence, 1, kZLoss, {}).over_ranks(session());
      EXPECT_EQ(sums.tokens, sequence.counted());
      EXPECT_NEAR(sums.cross_entropy + sums.z, expected_loss, 1e-6 * expected_loss);

      const std::vector<float> all = summed(gradients);
      ASSERT_EQ(all.size(), expected.size());
      size_t at = 0;
      for (const Parameter& parameter : parameters_of(weights)) {
        const auto part = [&](const auto& list) {
          return std::span(list).subspan(at, parameter.values.size());
        };
        EXPECT_LE(relative_error(part(all), part(expected)), 1e-4) << parameter.name << ", tile " << tile;
        at += parameter.values.size();
      }
    }
  }
}

// A run of 20 steps on all ranks beside the same run on this rank alone.
void compare_runs(const Case& test, const std::vector<Data>& data) {
  const MpiSession alone(MPI_COMM_SELF);
  Weights weights = tiny_model(test.pattern, test.tied, 15);
  Weights weights_alone = copy_of(weights);
  const ShardPlan shards(test.tokens, session().ranks(), test.alignment);
  const ShardPlan whole(test.tokens, 1, test.alignment);
  Trainer trainer(session(), weights, test.pattern, shards, 6, options_of_a_run());
  Trainer trainer_alone(alone, weights_alone, test.pattern, whole, 64, options_of_a_run());
  for (int64_t step = 1; step <= 20; ++step) {
    // Two sequences a step: gradients are accumulated.
    const TrainingSequence sequences[2] = {data[static_cast<size_t>(step) % data.size()].view(),
                                           data[static_cast<size_t>(step + 1) % data.size()].view()};
    const StepResult result = trainer.step(step, sequences);
    const StepResult expected = trainer_alone.step(step, sequences);
    ASSERT_FALSE(result.skipped);
    EXPECT_EQ(result.counted_tokens, expected.counted_tokens);
    EXPECT_NEAR(result.loss, expected.loss, 1e-6 * expected.loss) << "step " << step;
    EXPECT_NEAR(result.gradient_norm, expected.gradient_norm, 1e-4 * expected.gradient_norm);
    const std::vector<float> all = summed(trainer.gradients());
    std::vector<float> expected_all;
    for (const Parameter& parameter : parameters_of(trainer_alone.gradients()))
      expected_all.insert(expected_all.end(), parameter.values.begin(), parameter.values.end());
    EXPECT_LE(relative_error(std::span<const float>(all), std::span<const float>(expected_all)), 1e-4)
        << "step " << step;
  }
  EXPECT_NEAR(trainer.validate(std::vector{data[0].view()}),
              trainer_alone.validate(std::vector{data[0].view()}), 1e-5);
}

TEST(Training, IsTheSameOnAnyNumberOfRanks) {
  set_kernel_threads(1);
  for (const Case& test : cases()) {
    SCOPED_TRACE(test.name);
    std::vector<Data> data;
    for (uint64_t seed = 1; seed <= 3; ++seed)
      data.push_back(make_data(test.tokens, 11, test.document_begins, seed));
    compare_runs(test, data);
  }
}

TEST(Training, LabelsOfOneRankMayAllBeIgnored) {
  set_kernel_threads(1);
  const Case test = cases()[1];
  std::vector<Data> data;
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    Data& one = data.emplace_back(make_data(test.tokens, 11, test.document_begins, seed));
    const TokenRange first = ShardPlan(test.tokens, session().ranks() + 1, test.alignment).shard(0);
    std::fill(one.labels.begin(), one.labels.begin() + first.end, kIgnoredLabel);
  }
  compare_runs(test, data);
}

TEST(Training, RepeatsBitForBit) {
  set_kernel_threads(1);
  const Case test = cases()[1];
  const Data data = make_data(test.tokens, 11, test.document_begins, 3);
  std::vector<float> results[2];
  for (std::vector<float>& result : results) {
    Weights weights = tiny_model(test.pattern, true, 15);
    const ShardPlan shards(test.tokens, session().ranks(), test.alignment);
    Trainer trainer(session(), weights, test.pattern, shards, 6, options_of_a_run());
    for (int64_t step = 1; step <= 3; ++step)
      trainer.step(step, std::vector{data.view()});
    for (const Parameter& parameter : parameters_of(weights))
      result.insert(result.end(), parameter.values.begin(), parameter.values.end());
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(Training, LearnsARepeatingText) {
  set_kernel_threads(1);
  const AttentionPattern pattern = AttentionPattern::window_and_landmarks(9, 4);
  Data data;
  for (int64_t i = 0; i < 48; ++i) {
    data.tokens.push_back(static_cast<int32_t>(i * i % 7));
    data.labels.push_back(static_cast<int32_t>((i + 1) * (i + 1) % 7));
    data.doc_start.push_back(0);
  }
  Weights weights = tiny_model(pattern, true, 2);
  const ShardPlan shards(48, session().ranks(), 4);
  TrainerOptions options;
  options.schedule = {ScheduleShape::kCosine, 1e-2, 1e-3, 5, 0, 60};
  Trainer trainer(session(), weights, pattern, shards, 16, options);
  double first = 0, last = 0;
  for (int64_t step = 1; step <= 60; ++step) {
    last = trainer.step(step, std::vector{data.view()}).loss;
    if (step == 1) first = last;
  }
  EXPECT_GT(first, 1.5);  // about the logarithm of 11 tokens
  EXPECT_LT(last, 0.3);
}

// A weight that is not a number on ONE rank: all skip the step, and nothing has changed.
TEST(Training, StepsThatAreNotFiniteAreSkippedByAll) {
  set_kernel_threads(1);
  const Case test = cases()[0];
  const Data data = make_data(test.tokens, 11, test.document_begins, 3);
  Weights weights = tiny_model(test.pattern, true, 15);
  const ShardPlan shards(test.tokens, session().ranks(), test.alignment);
  Trainer trainer(session(), weights, test.pattern, shards, 6, options_of_a_run());
  EXPECT_FALSE(trainer.step(1, std::vector{data.view()}).skipped);
  const std::vector<float> master(trainer.optimizer().master().begin(), trainer.optimizer().master().end());
  const float kept = weights.layers[1].down[3];
  if (session().rank() == session().ranks() - 1)
    weights.layers[1].down[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(trainer.step(2, std::vector{data.view()}).skipped);
  EXPECT_EQ(trainer.optimizer().steps(), 1);
  EXPECT_EQ(std::vector<float>(trainer.optimizer().master().begin(), trainer.optimizer().master().end()),
            master);
  weights.layers[1].down[3] = kept;
  EXPECT_FALSE(trainer.step(3, std::vector{data.view()}).skipped);
}

}  // namespace
}  // namespace longhalo::test

// What the tests of checkpoints share: ranks that are threads, and a small job whose whole state follows from
// its step, so that any checkpoint can be told right from wrong.
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/checkpoint_restore.hpp"
#include "storage/checkpoint_writer.hpp"

namespace longhalo::testing {

// Runs `body` once a rank, each on its own thread; exceptions of a rank fail the test.
class ThreadRanks {
 public:
  explicit ThreadRanks(int ranks) : ranks_(ranks), barrier_(ranks), texts_(static_cast<size_t>(ranks)) {}

  void run(const std::function<void(const RankAgreement&)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks_; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(agreement(rank));
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    }
    for (std::thread& thread : threads)
      thread.join();
  }

 private:
  std::vector<std::string> exchange(int rank, const std::string& value) {
    texts_[static_cast<size_t>(rank)] = value;
    barrier_.arrive_and_wait();
    std::vector<std::string> all = texts_;
    barrier_.arrive_and_wait();
    return all;
  }
  RankAgreement agreement(int rank) {
    const auto together = [this, rank](const std::function<void()>& work) {
      std::string fault;
      try {
        work();
      } catch (const std::exception& error) {
        fault = error.what();
      }
      for (const std::string& seen : exchange(rank, fault)) {
        if (!seen.empty()) throw UserError(seen, "some rank", "see above");
      }
    };
    const auto gather = [this, rank](const std::string& value) {
      const std::vector<std::string> all = exchange(rank, value);
      return rank == 0 ? all : std::vector<std::string>{};
    };
    const auto broadcast = [this, rank](const std::string& value) { return exchange(rank, value)[0]; };
    return {rank, ranks_, together, gather, broadcast};
  }

  int ranks_;
  std::barrier<> barrier_;
  std::vector<std::string> texts_;
};

// Two groups of parameters, of odd lengths; the second is shorter than some numbers of ranks.
class SmallJob {
 public:
  static constexpr int64_t kDecayed = 10'007;
  static constexpr int64_t kPlain = 2;

  SmallJob(int64_t step, int rank, int ranks) : step_(step), rank_(rank), ranks_(ranks) {
    for (int64_t i = 0; i < 4000; ++i)
      weights_.push_back(weight(step, i));
  }

  static float weight(int64_t step, int64_t i) {
    return static_cast<float>(step) + 0.25F * static_cast<float>(i % 7);
  }
  static float moment(int64_t step, int64_t i) {
    return std::sin(static_cast<float>(i)) * static_cast<float>(step);
  }

  // Points into this job.
  CheckpointContents contents() {
    CheckpointContents result;
    result.step = step_;
    const auto bytes = std::as_bytes(std::span(weights_));
    result.weights = {{"model.embed_tokens.weight", Dtype::kF32, {100, 30}, bytes.first(12000)},
                      {"model.norm.weight", Dtype::kF32, {1000}, bytes.subspan(12000)}};
    result.files = {{"config.json", R"({"model_type": "llama"})"}};
    result.job_state = {{"tokens_seen", step_ * 1000}, {"loss", 0.1 * static_cast<double>(step_)}};
    result.rank_state = {{"random", 0xfedcba9876543210u - static_cast<uint64_t>(rank_)}};
    arrays_.clear();
    for (const auto& [group, total] : {std::pair{"decayed", kDecayed}, std::pair{"plain", kPlain}}) {
      const StateRange range{group, total * rank_ / ranks_, total * (rank_ + 1) / ranks_, total};
      auto values = std::make_unique<std::vector<float>>();
      for (int64_t i = range.begin; i < range.end; ++i)
        values->push_back(moment(step_, i));
      result.optimizer.push_back({range, {{"first_moment", *values}, {"weights", *values}}});
      arrays_.push_back(std::move(values));
    }
    return result;
  }

  // What a checkpoint holds has to be what its step says, whatever ranks wrote it and read it.
  static void expect_right(const RestoredCheckpoint& found, int rank, int ranks) {
    const int64_t step = found.manifest.step;
    EXPECT_EQ(found.manifest.job_state.at("tokens_seen"), step * 1000);
    EXPECT_EQ(found.manifest.job_state.at("loss").get<double>(), 0.1 * static_cast<double>(step));
    ASSERT_EQ(found.manifest.rank_states.size(), static_cast<size_t>(found.manifest.ranks));
    EXPECT_EQ(found.manifest.rank_states.back().at("random"),
              0xfedcba9876543210u - static_cast<uint64_t>(found.manifest.ranks - 1));
    const ModelWeights weights(found.folder);
    std::vector<float> norm(1000);
    copy_as_float(weights.view("model.norm.weight"), norm);
    for (int64_t i = 0; i < 1000; ++i)
      ASSERT_EQ(norm[static_cast<size_t>(i)], weight(step, 3000 + i));
    OptimizerStateReader optimizer = found.optimizer();
    for (const auto& [group, total] : {std::pair{"decayed", kDecayed}, std::pair{"plain", kPlain}}) {
      ASSERT_EQ(optimizer.total(group), total);
      const int64_t begin = total * rank / ranks;
      std::vector<float> values(static_cast<size_t>(total * (rank + 1) / ranks - begin), NAN);
      for (const char* array : {"first_moment", "weights"}) {
        optimizer.read(group, array, begin, values);
        for (size_t i = 0; i < values.size(); ++i)
          ASSERT_EQ(values[i], moment(step, begin + static_cast<int64_t>(i))) << group << " " << i;
      }
    }
  }

 private:
  int64_t step_;
  int rank_, ranks_;
  std::vector<float> weights_;
  std::vector<std::unique_ptr<std::vector<float>>> arrays_;
};

inline std::filesystem::path write_checkpoint(CheckpointWriter& writer, int64_t step, int rank = 0,
                                              int ranks = 1) {
  SmallJob job(step, rank, ranks);
  writer.start(job.contents());
  return writer.commit();
}

}  // namespace longhalo::testing

// The state of training over ranks, into a checkpoint and back: every element where it was, whatever number
// of ranks and size of buckets wrote it and reads it, and a run that goes on as if it had not been stopped.
#include <gtest/gtest.h>

#include <filesystem>
#include <optional>

#include "../storage/scratch.hpp"
#include "kernels/matmul/matmul.hpp"
#include "model/trainer.hpp"
#include "model/training_memory.hpp"
#include "model/training_snapshot.hpp"
#include "storage/checkpoint_restore.hpp"
#include "support/mpi_main.hpp"
#include "support/reference_model.hpp"

namespace longhalo::test {
namespace {

namespace fs = std::filesystem;

// Rank 0's scratch folder, which all ranks name.
class SharedFolder {
 public:
  SharedFolder() {
    if (session().is_root()) own_.emplace();
    path_ = broadcast_text(session(), own_ ? own_->path().string() : std::string());
  }
  ~SharedFolder() { MPI_Barrier(session().comm()); }
  const fs::path& path() const { return path_; }

 private:
  std::optional<longhalo::testing::ScratchFolder> own_;
  fs::path path_;
};

// The first `count` ranks as a session of their own; on the others there is none.
class FirstRanks {
 public:
  explicit FirstRanks(int count) {
    const bool is_in = session().rank() < count;
    check_mpi(MPI_Comm_split(session().comm(), is_in ? 0 : MPI_UNDEFINED, session().rank(), &comm_),
              "MPI_Comm_split");
    if (is_in) session_.emplace(comm_);
  }
  ~FirstRanks() {
    session_.reset();
    if (comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
  }
  FirstRanks(const FirstRanks&) = delete;
  FirstRanks& operator=(const FirstRanks&) = delete;
  const MpiSession* operator->() const { return &*session_; }
  const MpiSession& operator*() const { return *session_; }
  explicit operator bool() const { return session_.has_value(); }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::optional<MpiSession> session_;
};

RankAgreement agreement_of(const MpiSession& ranks) {
  return {ranks.rank(), ranks.ranks(), [&ranks](const std::function<void()>& work) { ranks.together(work); },
          [&ranks](const std::string& value) { return gather_text(ranks, value); },
          [&ranks](const std::string& value) { return broadcast_text(ranks, value); }};
}

Weights tiny_model(uint64_t seed) {
  ModelConfig config;
  config.layers = 2;
  config.hidden = 8;
  config.ffn = 12;
  config.heads = 2;
  config.kv_heads = 1;
  config.head_dim = 8;
  config.vocabulary = 11;
  config.tied_embeddings = true;
  return small_model(config, 1, seed);
}

void write(const MpiSession& ranks, const fs::path& folder, int64_t step, const Weights& weights,
           ShardedOptimizer& optimizer) {
  CheckpointWriter writer(folder, agreement_of(ranks));
  const TrainingSnapshot snapshot = snapshot_of(weights, optimizer, writer);
  CheckpointContents contents;
  contents.step = step;
  contents.weights = snapshot.weights();
  contents.optimizer = snapshot.optimizer();
  writer.start(std::move(contents));
  writer.commit();
}

void read(const MpiSession& ranks, const fs::path& folder, int64_t updates, ShardedOptimizer& optimizer) {
  const std::optional<RestoredCheckpoint> found = find_checkpoint(folder, agreement_of(ranks));
  ASSERT_TRUE(found);
  OptimizerStateReader reader = found->optimizer();
  restore_optimizer(ranks, reader, updates, optimizer);
}

// Calls visit(index in this rank's arrays, element of all parameters).
template <class Visit>
void for_owned(const ShardedOptimizer& optimizer, const Visit& visit) {
  size_t own = 0;
  for (const OwnedElements& part : optimizer.layout().owned)
    for (int64_t element = part.flat.begin; element < part.flat.end; ++element)
      visit(own++, element);
}

std::vector<float> flat(Weights& weights) {
  std::vector<float> all;
  for (const Parameter& parameter : parameters_of(weights))
    all.insert(all.end(), parameter.values.begin(), parameter.values.end());
  return all;
}

// Values say which element they are, exactly: it has fewer than 2^22.
TEST(TrainingSnapshot, EveryElementComesBackOnAnyRanks) {
  const SharedFolder folder;
  constexpr std::pair<int64_t, int64_t> kBuckets[] = {{64, 64}, {100, 37}, {5000, 300}};  // written, read
  const int most = session().ranks();
  for (int writers = 1; writers <= most; ++writers) {
    for (int readers = 1; readers <= most; ++readers) {
      if (writers < most && readers < most) continue;  // this test runs on fewer ranks too
      const auto& [bucket_written, bucket_read] = kBuckets[(writers + readers) % 3];
      const fs::path place = folder.path() / (std::to_string(writers) + "_" + std::to_string(readers));
      if (const FirstRanks ranks(writers); ranks) {
        Weights weights = tiny_model(1), gradients = zeros_like(weights);
        ShardedOptimizer optimizer(*ranks, weights, gradients, {}, bucket_written);
        for_owned(optimizer, [&](size_t own, int64_t element) {
          optimizer.master()[own] = static_cast<float>(element);
          optimizer.first_moment()[own] = static_cast<float>(element) + 0.25F;
          optimizer.second_moment()[own] = static_cast<float>(element) + 0.5F;
        });
        write(*ranks, place, 7, weights, optimizer);
      }
      MPI_Barrier(session().comm());
      if (const FirstRanks ranks(readers); ranks) {
        Weights weights = tiny_model(2), gradients = zeros_like(weights);
        ShardedOptimizer optimizer(*ranks, weights, gradients, {}, bucket_read);
        read(*ranks, place, 7, optimizer);
        EXPECT_EQ(optimizer.steps(), 7);
        for_owned(optimizer, [&](size_t own, int64_t element) {
          ASSERT_EQ(optimizer.master()[own], static_cast<float>(element));
          ASSERT_EQ(optimizer.first_moment()[own], static_cast<float>(element) + 0.25F);
          ASSERT_EQ(optimizer.second_moment()[own], static_cast<float>(element) + 0.5F);
        });
        const std::vector<float> all = flat(weights);
        for (size_t i = 0; i < all.size(); ++i)
          ASSERT_EQ(all[i], static_cast<float>(i)) << "every rank has all weights";
      }
    }
  }
}

TEST(TrainingSnapshot, IsOfItsMoment) {
  const SharedFolder folder;
  Weights weights = tiny_model(1), gradients = zeros_like(weights);
  ShardedOptimizer optimizer(session(), weights, gradients, {}, 64);
  const std::vector<float> before = flat(weights);
  CheckpointWriter writer(folder.path(), agreement_of(session()));
  const TrainingSnapshot snapshot = snapshot_of(weights, optimizer, writer);
  // What changes after it was taken is not in it, although the writer reads it only now.
  for (float& value : optimizer.master())
    value = 99;
  optimizer.restore(1);
  CheckpointContents contents;
  contents.weights = snapshot.weights();
  contents.optimizer = snapshot.optimizer();
  writer.start(std::move(contents));
  const fs::path written = writer.commit();
  const Weights read_back = load_weights(written, weights.config, {1, {}});
  Weights other = tiny_model(2), other_gradients = zeros_like(other);
  ShardedOptimizer restored(session(), other, other_gradients, {}, 64);
  read(session(), folder.path(), 0, restored);
  EXPECT_EQ(flat(other), before);
  EXPECT_TRUE(std::equal(read_back.layers[1].down.span().begin(), read_back.layers[1].down.span().end(),
                         other.layers[1].down.span().begin()));
  EXPECT_EQ(flat(weights), std::vector<float>(before.size(), 99));
}

// What a plan says of the disk is what all ranks' parts and the weights take.
TEST(TrainingSnapshot, TakesWhatThePlanSays) {
  const SharedFolder folder;
  const AttentionPattern pattern = AttentionPattern::window_and_landmarks(9, 4);
  for (const bool tied : {true, false}) {
    ModelConfig config = tiny_model(1).config;
    config.tied_embeddings = tied;
    Weights weights = small_model(config, 1, 1), gradients = zeros_like(weights);
    ShardedOptimizer optimizer(session(), weights, gradients, {}, 64);
    CheckpointWriter writer(folder.path(), agreement_of(session()));
    const TrainingSnapshot snapshot = snapshot_of(weights, optimizer, writer);
    int64_t bytes = sum_over_ranks(session(), bytes_of(snapshot.optimizer()));
    for (const NamedTensor& tensor : snapshot.weights())
      bytes += static_cast<int64_t>(tensor.bytes.size());
    const ShardPlan shards(41, session().ranks(), 4);
    EXPECT_EQ(training_memory(weights.config, pattern, shards, 6, 1).checkpoint, bytes) << tied;
  }
}

// What a plan says of the memory: a file of weights is copied whole by the rank that writes it, on however
// many ranks.
TEST(TrainingSnapshot, HoldsNoMoreThanThePlanSays) {
  const SharedFolder folder;
  const AttentionPattern pattern = AttentionPattern::window_and_landmarks(9, 4);
  Weights weights = tiny_model(1), gradients = zeros_like(weights);
  const int64_t kFileBytes = CheckpointOptions{}.max_weight_file_bytes;
  const int64_t all_weights = elements_of(parameters_of(weights)) * 4;
  for (int count = 1; count <= session().ranks(); ++count) {
    for (const int64_t file_bytes : {kFileBytes, all_weights / 2, all_weights / 7, int64_t{1}}) {
      if (const FirstRanks ranks(count); ranks) {
        ShardedOptimizer optimizer(*ranks, weights, gradients, {});
        CheckpointOptions options;
        options.max_weight_file_bytes = file_bytes;
        const CheckpointWriter writer(folder.path(), agreement_of(*ranks), options);
        const TrainingSnapshot snapshot = snapshot_of(weights, optimizer, writer);
        int64_t bytes = bytes_of(snapshot.optimizer());
        for (const size_t index : writer.tensors_written_here(snapshot.weights()))
          bytes += static_cast<int64_t>(snapshot.weights()[index].bytes.size());
        const auto most = static_cast<int64_t>(spread_over_ranks(*ranks, static_cast<double>(bytes)).max);
        const int64_t planned = most_snapshot_bytes(weights.config, 1, Dtype::kF32, count, file_bytes);
        EXPECT_GE(planned, most) << count << " ranks, files of " << file_bytes;
        // The rank with the most weights may own one element less than others.
        EXPECT_LE(planned, most + kOptimizerStateBytes) << count << " ranks, files of " << file_bytes;
        const TrainingMemory plan = training_memory(weights.config, pattern, ShardPlan(41, count, 4), 6, 1);
        for (const MemoryItem& item : plan.fixed)
          if (item.name.starts_with("job checkpoint") && file_bytes == kFileBytes) {
            EXPECT_EQ(item.bytes, planned) << count;
          }
      }
      MPI_Barrier(session().comm());
    }
  }
}

TEST(TrainingSnapshot, OfAnotherModelIsRefusedByAll) {
  const SharedFolder folder;
  Weights weights = tiny_model(1), gradients = zeros_like(weights);
  ShardedOptimizer optimizer(session(), weights, gradients, {}, 64);
  write(session(), folder.path(), 1, weights, optimizer);
  ModelConfig larger = weights.config;
  larger.ffn = 20;
  Weights other = small_model(larger, 1, 1), other_gradients = zeros_like(other);
  ShardedOptimizer of_other(session(), other, other_gradients, {}, 64);
  const auto found = find_checkpoint(folder.path(), agreement_of(session()));
  ASSERT_TRUE(found);
  OptimizerStateReader reader = found->optimizer();
  EXPECT_THROW(restore_optimizer(session(), reader, 1, of_other), JointError);
  EXPECT_NE(fingerprint_of(sizes_of(parameters_of(weights))), fingerprint_of(sizes_of(parameters_of(other))));
}

struct TrainRun {
  std::vector<double> losses;
  std::vector<float> weights;
};

// Twelve steps; with `then`, six on the first `ranks` ranks, a checkpoint, and six on the first `then`.
TrainRun run_of(const fs::path& folder, int ranks, std::optional<int> then) {
  constexpr int64_t kTokens = 41, kAlignment = 4, kSteps = 12;
  const AttentionPattern pattern = AttentionPattern::window_and_landmarks(9, kAlignment);
  const std::vector<int32_t> tokens = random_tokens(kTokens + 1, 11, 6);
  const std::vector<int64_t> doc_start(static_cast<size_t>(kTokens), 0);
  const TrainingSequence sequence{std::span(tokens).first(kTokens), std::span(tokens).last(kTokens),
                                  doc_start};
  TrainerOptions options;
  options.schedule = {ScheduleShape::kCosine, 3e-3, 3e-4, 3, 0, kSteps};
  TrainRun run;
  const auto go = [&](int count, int64_t first, int64_t last) {
    const FirstRanks some(count);
    if (!some) return;
    const ShardPlan shards(kTokens, count, kAlignment);
    Weights weights = tiny_model(first == 1 ? 15 : 16);
    Trainer trainer(*some, weights, pattern, shards, 6, options);
    if (first > 1) read(*some, folder, first - 1, trainer.optimizer());
    for (int64_t step = first; step <= last; ++step)
      run.losses.push_back(trainer.step(step, std::vector{sequence}).loss);
    if (last < kSteps) write(*some, folder, last, weights, trainer.optimizer());
    run.weights = flat(weights);
  };
  go(ranks, 1, then ? kSteps / 2 : kSteps);
  MPI_Barrier(session().comm());
  if (then) go(*then, kSteps / 2 + 1, kSteps);
  return run;
}

TEST(TrainingResumed, IsTheSameRunBitForBit) {
  set_kernel_threads(1);
  const SharedFolder folder;
  const int ranks = session().ranks();
  const TrainRun whole = run_of(folder.path(), ranks, {}), parts = run_of(folder.path(), ranks, ranks);
  EXPECT_EQ(whole.losses, parts.losses);
  EXPECT_EQ(whole.weights, parts.weights);
}

TEST(TrainingResumed, FollowsOnOtherNumbersOfRanks) {
  set_kernel_threads(1);
  for (int then = 1; then <= session().ranks(); ++then) {
    const SharedFolder folder;
    const TrainRun whole = run_of(folder.path(), session().ranks(), {});
    const TrainRun parts = run_of(folder.path(), session().ranks(), then);
    for (size_t i = 0; i < parts.losses.size(); ++i)  // ranks that are no longer there have the first half
      EXPECT_NEAR(whole.losses[i], parts.losses[i], 1e-5 * whole.losses[i])
          << then << " ranks, step " << i + 1;
  }
}

}  // namespace
}  // namespace longhalo::test

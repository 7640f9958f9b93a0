// The plan of a training step: items that are what training allocates, and activations that go to the first
// place with room.
#include "app/training_plan.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <optional>
#include <string>

#include "app/training_setup.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "model/layer_activations.hpp"
#include "model/parameters.hpp"
#include "model/prefill.hpp"
#include "model/weights.hpp"

namespace longhalo {
namespace {

constexpr int64_t kMuch = int64_t{1} << 50;
constexpr double kRate = 1e11;

TrainingTask small_task() {
  TrainingTask task;
  task.shape.layers = 7;
  task.shape.hidden = 64;
  task.shape.ffn = 160;
  task.shape.heads = 4;
  task.shape.kv_heads = 2;
  task.shape.head_dim = 16;
  task.shape.vocabulary = 1000;
  task.shape.tied_embeddings = true;
  task.pattern = AttentionPattern::window_and_landmarks(256, 64);
  task.tokens = 100'000;
  task.ranks = 2;
  task.tile = 512;
  return task;
}

TrainingBudget budget_of(int64_t device, int64_t scratch) {
  TrainingBudget budget;
  budget.device_bytes = device;
  budget.device_place = "host here";
  budget.scratch_bytes = scratch;
  budget.scratch = "/scratch";
  return budget;
}

TrainingPlan plan_of(const TrainingTask& task, const TrainingBudget& budget) {
  const MemoryOfStep memory_of = [&](const ShardPlan& shards, int64_t tile, double every) {
    return training_memory(task.shape, task.pattern, shards, tile, every);
  };
  return plan_training(task, budget, memory_of, kRate);
}

int64_t item(const TrainingPlan& plan, std::string_view name) {
  int64_t bytes = 0;
  for (const MemoryItem& one : plan.items)
    if (one.name.starts_with(name)) bytes += one.bytes;
  return bytes;
}

TEST(TrainingPlan, ItemsAreWhatTrainingAllocates) {
  const TrainingTask task = small_task();
  Weights weights = random_weights(task.shape, {1, std::nullopt}, 1);
  add_landmark_queries(weights, 1);
  const int64_t elements = elements_of(parameters_of(weights));
  const TrainingPlan plan = plan_of(task, budget_of(kMuch, 0));
  EXPECT_EQ(item(plan, "weights"), elements * 4);
  EXPECT_EQ(item(plan, "gradients"), elements * 4 + item(plan, "gradients of keys"));
  EXPECT_EQ(item(plan, "optimizer: master"), 4 * ((elements + 1) / 2) * 4);
  EXPECT_EQ(item(plan, "job checkpoint"), (elements + 3 * ((elements + 1) / 2)) * 4)
      << "one rank writes the one file of weights, and copies all of it";
  EXPECT_EQ(item(plan, "residual stream"), 3 * plan.tokens_per_rank * 64 * 4);
  const ShardPlan shards = plan_shards(task.shape, task.pattern, task.tokens, 2);
  EXPECT_EQ(plan.tokens_per_rank, std::max(shards.shard(0).size(), shards.shard(1).size()));
  // The second shard has a halo of 256 tokens, and all ranks have all landmarks.
  const int64_t rows = std::max(shards.shard(0).size(), shards.shard(1).size() + 256) + task.tokens / 64;
  EXPECT_EQ(item(plan, "keys and values of a layer"), 2 * rows * 32 * 4);
  EXPECT_EQ(item(plan, "activations: all"), 7 * (plan.tokens_per_rank * 64 * 4 + 2 * rows * 32 * 4 +
                                                 LayerActivations::bytes(task.shape, plan.tokens_per_rank)));
  EXPECT_EQ(plan.place, ActivationPlace::kOff);
  EXPECT_EQ(plan.disk_bytes, 0);
  EXPECT_EQ(plan.checkpoint_bytes, elements * 16) << "weights, master weights, two moments";
  EXPECT_EQ(plan.model_bytes, elements * 4);
}

TEST(TrainingPlan, TableSaysWhereJobCheckpointsGo) {
  TrainingTask task = small_task();
  task.shape.hidden = 1024;
  TrainingBudget budget = budget_of(kMuch, 0);
  budget.checkpoints = "/out/checkpoints";
  budget.checkpoint_bytes = 5'000'000'000;
  EXPECT_EQ(plan_of(task, budget).table().find("job checkpoints"), std::string::npos) << "none are written";
  task.checkpoints = 3;
  const TrainingPlan plan = plan_of(task, budget);
  ASSERT_EQ(plan.checkpoint_bytes, 16 * 5'856'508);
  const std::string table = plan.table();
  EXPECT_NE(table.find("   281.1 MB  3 of 93.7 MB, the one being written included, of all ranks together, "
                       "in /out/checkpoints, which has 5000.0 MB free\n"),
            std::string::npos)
      << table;
  task.checkpoints = 1;
  EXPECT_NE(plan_of(task, budget).table().find("    93.7 MB  of all ranks together, in /out/checkpoints"),
            std::string::npos);
}

TEST(TrainingPlan, TableSaysWhereTheModelGoes) {
  TrainingTask task = small_task();
  task.shape.hidden = 1024;
  TrainingBudget budget = budget_of(kMuch, 0);
  budget.model = "/out/model";
  EXPECT_EQ(plan_of(task, budget).table().find("trained model"), std::string::npos) << "none is written";
  task.models = 1;
  EXPECT_NE(plan_of(task, budget).table().find("    23.4 MB  in /out/model\n"), std::string::npos);
  task.models = 2;
  EXPECT_NE(plan_of(task, budget)
                .table()
                .find("    46.9 MB  2 of 23.4 MB, the one being written included, in /out/model\n"),
            std::string::npos);
}

TEST(TrainingPlan, CheckpointsAndModelsOfAJob) {
  const auto checkpoints = [](int64_t steps, int64_t every, int64_t keep) {
    Config::Train train;
    train.steps = steps;
    train.checkpoint_every = every;
    train.checkpoint_keep = keep;
    return checkpoints_at_once(train);
  };
  EXPECT_EQ(checkpoints(100, 10, 2), 3);
  EXPECT_EQ(checkpoints(100, 0, 2), 1) << "at the end";
  EXPECT_EQ(checkpoints(100, 100, 2), 1);
  EXPECT_EQ(checkpoints(100, 99, 2), 2) << "and at the end";
  EXPECT_EQ(checkpoints(100, 10, 20), 10);
  EXPECT_EQ(checkpoints(101, 10, 20), 11);
  const auto models = [](int64_t steps, int64_t every) {
    Config::Train train;
    train.steps = steps;
    train.save_every = every;
    return models_at_once(train);
  };
  EXPECT_EQ(models(100, 0), 1);
  EXPECT_EQ(models(100, 100), 1);
  EXPECT_EQ(models(100, 99), 2);
}

TEST(TrainingPlan, AScratchFolderThatCannotBeUsedIsNoPlan) {
  TrainingTask task = small_task();
  TrainingPlan plan = plan_of(task, budget_of(kMuch, kMuch));
  plan.require();
  const UserError scratch("no right", "/scratch", "choose another");
  const auto reason = [&] {
    plan.scratch_fault = scratch;
    try {
      plan.require();
    } catch (const UserError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  EXPECT_EQ(reason(), scratch.what());
  task.store = ActivationSetting::kNvme;
  plan = plan_of(task, budget_of(kMuch, 0));
  ASSERT_NE(plan.fault, "");
  EXPECT_EQ(reason(), scratch.what()) << "there is no room in it because it cannot be used";
  plan = plan_of(task, budget_of(1000, kMuch));
  EXPECT_NE(reason().find("a training step needs"), std::string::npos) << "another folder would not help";
}

TEST(TrainingPlan, AutoTakesTheFirstPlaceWithRoom) {
  TrainingTask task = small_task();
  const TrainingPlan all = plan_of(task, budget_of(kMuch, kMuch));
  EXPECT_EQ(all.place, ActivationPlace::kOff);
  EXPECT_EQ(plan_of(task, budget_of(all.bytes(), 0)).place, ActivationPlace::kOff) << "to the last byte";
  const TrainingPlan device = plan_of(task, budget_of(all.bytes() - 1, kMuch));
  EXPECT_EQ(device.place, ActivationPlace::kDevice);
  EXPECT_NE(device.why.find("off would need"), std::string::npos) << device.why;
  EXPECT_LT(device.bytes(), all.bytes());
  const TrainingPlan disk = plan_of(task, budget_of(device.bytes() - 1, kMuch));
  EXPECT_EQ(disk.place, ActivationPlace::kNvme);
  EXPECT_NE(disk.why.find("device would need"), std::string::npos) << disk.why;
  EXPECT_LT(disk.bytes(), device.bytes());
  EXPECT_GE(disk.disk_bytes, 7 * disk.tokens_per_rank * 64 * 4);
  EXPECT_TRUE(disk.fault.empty());
  // What is computed again takes time.
  EXPECT_GT(device.seconds, 1.1 * all.seconds);
  EXPECT_EQ(device.seconds, disk.seconds);

  task.every = 3;
  const TrainingPlan third = plan_of(task, budget_of(kMuch, kMuch));
  EXPECT_EQ(third.place, ActivationPlace::kDevice) << "off keeps every layer";
  EXPECT_EQ(item(third, "activations: stored"), 3 * third.tokens_per_rank * 64 * 4);
  EXPECT_EQ(item(third, "activations: inputs"), 3 * third.tokens_per_rank * 64 * 4);
  EXPECT_GT(third.seconds, device.seconds);
}

// A device with memory of its own puts host memory between itself and the disk.
TEST(TrainingPlan, DeviceWithAHostBeside) {
  TrainingTask task = small_task();
  TrainingBudget budget = budget_of(kMuch, kMuch);
  budget.has_own_host = true;
  budget.host_bytes = kMuch;
  task.store = ActivationSetting::kDevice;
  const int64_t on_device = plan_of(task, budget).bytes();
  task.store = ActivationSetting::kAuto;
  budget.device_bytes = on_device - 1;
  const TrainingPlan host = plan_of(task, budget);
  EXPECT_EQ(host.place, ActivationPlace::kHost);
  EXPECT_EQ(host.host_bytes(), 7 * host.tokens_per_rank * 64 * 4);
  EXPECT_EQ(host.bytes() + host.host_bytes(), on_device);
  budget.host_bytes = host.host_bytes() - 1;
  const TrainingPlan disk = plan_of(task, budget);
  EXPECT_EQ(disk.place, ActivationPlace::kNvme);
  EXPECT_EQ(disk.host_bytes(), disk_buffers(disk.tokens_per_rank * 64 * 4).bytes());
  EXPECT_EQ(disk.bytes(), host.bytes()) << "the buffers are the host's";
}

// What the remedy offers does fit.
TEST(TrainingPlan, RemediesFit) {
  TrainingTask task = small_task();
  task.store = ActivationSetting::kDevice;
  const int64_t needed = plan_of(task, budget_of(kMuch, 0)).bytes();
  const TrainingBudget budget = budget_of(needed - 10'000'000, kMuch);
  const TrainingPlan plan = plan_of(task, budget);
  EXPECT_FALSE(plan.fault.empty());
  const std::string words = plan.remedy;
  const auto decimal_after = [&](const std::string& phrase) -> double {
    const size_t at = words.find(phrase);
    EXPECT_NE(at, std::string::npos) << phrase << " in " << words;
    return at == std::string::npos ? 1 : std::stod(words.substr(at + phrase.size()));
  };
  const auto number_after = [&](const std::string& phrase) {
    return static_cast<int64_t>(decimal_after(phrase));
  };
  EXPECT_NE(words.find("activations.store: nvme"), std::string::npos) << words;
  TrainingTask other = task;
  other.store = ActivationSetting::kNvme;
  EXPECT_EQ(plan_of(other, budget).fault, "");
  other = task;
  other.every = decimal_after("activations.every: ");
  EXPECT_EQ(plan_of(other, budget).fault, "");
  other = task;
  other.ranks = static_cast<int>(number_after("use "));
  EXPECT_EQ(plan_of(other, budget).fault, "");
  other = task;
  other.tokens = number_after("train.sequence_tokens to at most about ");
  EXPECT_EQ(plan_of(other, budget).fault, "");
  other.tokens = task.tokens - 1;
  EXPECT_NE(plan_of(other, budget).fault, "");
  try {
    plan.require();
    ADD_FAILURE() << "it does not fit";
  } catch (const UserError& error) {
    const std::string message = error.what();
    for (const char* word :
         {"a training step needs", "host here", "weights", "activations.store device", "remedy"})
      EXPECT_NE(message.find(word), std::string::npos) << message;
  }
}

TEST(TrainingPlan, FullDiskIsAFault) {
  TrainingTask task = small_task();
  task.store = ActivationSetting::kNvme;
  const TrainingPlan fits = plan_of(task, budget_of(kMuch, kMuch));
  EXPECT_EQ(plan_of(task, budget_of(kMuch, fits.disk_bytes)).fault, "");
  const TrainingPlan full = plan_of(task, budget_of(kMuch, fits.disk_bytes - 1));
  EXPECT_NE(full.fault.find("of disk, but /scratch has"), std::string::npos) << full.fault;
  EXPECT_NE(full.remedy.find("activations.store: device"), std::string::npos) << full.remedy;
  EXPECT_NE(full.remedy.find("activations.every: 1.17"), std::string::npos) << full.remedy;  // 6 of 7 layers
}

TEST(TrainingPlan, NothingFitsAtAll) {
  const TrainingPlan plan = plan_of(small_task(), budget_of(1000, 1000));
  EXPECT_NE(plan.fault, "");
  EXPECT_NE(plan.why.find("nothing fits"), std::string::npos) << plan.why;
  EXPECT_NE(plan.remedy.find("smaller model"), std::string::npos) << plan.remedy;
  EXPECT_NE(plan.table().find("does not fit"), std::string::npos);
}

TEST(DiskBuffers, HoldTwoLayersWithinBounds) {
  for (const int64_t layer : {int64_t{0}, int64_t{1}, int64_t{100'000}, int64_t{20'000'000},
                              int64_t{300'000'000}, int64_t{4'000'000'000}}) {
    const DiskBuffers buffers = disk_buffers(layer);
    EXPECT_EQ(buffers.chunk_bytes % 4096, 0);
    EXPECT_GE(buffers.count, 8);
    EXPECT_LE(buffers.count, 256);
    EXPECT_LE(buffers.bytes(), int64_t{512} << 20);
    if (layer <= 200'000'000) {
      EXPECT_GE(buffers.bytes(), 2 * layer);
    }
  }
}

TEST(TrainingFlops, CountWhatIsComputedAgain) {
  const TrainingTask task = small_task();
  const auto flops = [&](Recompute recompute, double every) {
    return training_flops(task.shape, task.pattern, task.tokens, recompute, every);
  };
  const TrainingFlops once = flops(Recompute::kNo, 1);
  EXPECT_EQ(once.all(), once.useful());
  const double layer = 64 * (2 * 64 + 2 * 32 + 3 * 160);
  EXPECT_DOUBLE_EQ(once.products, 6.0 * 100'000 * (7 * layer + 64 * 1000));
  const auto pairs = static_cast<double>(sequence_visible_pairs(task.pattern, task.tokens));
  EXPECT_DOUBLE_EQ(once.attention, 14.0 * 16 * 4 * 7 * pairs);
  const TrainingFlops again = flops(Recompute::kYes, 1);
  EXPECT_DOUBLE_EQ(again.attention_again, 4.0 * 16 * 4 * 7 * pairs);
  EXPECT_DOUBLE_EQ(again.products_again, 2.0 * 100'000 * 7 * (layer - 64 * 160));
  // Groups of 4 and 3 layers: 3 and 2 of them go forward once more.
  EXPECT_DOUBLE_EQ(flops(Recompute::kYes, 4).attention_again, 4.0 * 16 * 4 * (7 + 5) * pairs);
}

TEST(Scratch, IsWhatTheConfigSaysOrTheJobsOwnFolder) {
  const char* given = std::getenv("TMPDIR");
  const std::optional<std::string> before = given ? std::optional<std::string>(given) : std::nullopt;
  const auto with = [](const char* slurm, const char* any, const char* directory) {
    ::setenv("SLURM_TMPDIR", slurm, 1);
    ::setenv("TMPDIR", any, 1);
    Config config;
    config.activations.directory = directory;
    return activations_directory(config);
  };
  EXPECT_EQ(with("/of/job", "/of/node", "/mine"), "/mine");
  EXPECT_EQ(with("/of/job", "/of/node", ""), "/of/job");
  EXPECT_EQ(with("", "/of/node", ""), "/of/node");
  EXPECT_EQ(with("", "", ""), "/tmp");
  ::unsetenv("SLURM_TMPDIR");
  ::unsetenv("TMPDIR");
  EXPECT_EQ(activations_directory({}), "/tmp");
  if (before) ::setenv("TMPDIR", before->c_str(), 1);
}

}  // namespace
}  // namespace longhalo

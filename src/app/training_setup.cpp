#include "app/training_setup.hpp"

#include <cstdlib>
#include <optional>

#include "app/engine_setup.hpp"
#include "app/model_setup.hpp"
#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "device/available_memory.hpp"
#include "storage/disk_activation_store.hpp"
#include "storage/job_scratch.hpp"
#include "storage/posix.hpp"

namespace longhalo {
namespace {

constexpr int64_t kLeastTile = 1024;

int64_t least_of_ranks(const MpiSession& session, int64_t bytes) {
  return static_cast<int64_t>(spread_over_ranks(session, static_cast<double>(bytes)).min);
}

// Of the scratch disk, for each rank. Where free space is not known, the reservation of the file will find
// out.
int64_t free_scratch_bytes(const MpiSession& session, const std::filesystem::path& directory) {
  constexpr int64_t kUnknown = int64_t{1} << 50;
  const int64_t free = free_bytes(directory);
  return least_of_ranks(session, (free < 0 ? kUnknown : free) / session.local_ranks());
}

// Why this host's scratch folder cannot be used: the words of the job that would need it.
std::optional<UserError> fault_of_scratch(const MpiSession& session, const std::filesystem::path& directory,
                                          Scratch scratch) {
  std::optional<UserError> fault;
  session.together([&] {
    if (session.local_rank() != 0) return;
    try {
      JobScratch::require_usable(directory,
                                 scratch == Scratch::kClear ? DeadFolders::kRemove : DeadFolders::kLeave);
    } catch (const UserError& error) {
      fault = error;
    }
  });
  return fault;
}

TrainingBudget budget_of(const MpiSession& session, const Config& config, const TrainingEngine& engine) {
  TrainingBudget budget;
  budget.device_place = engine.memory_place();
  budget.device_bytes = least_of_ranks(session, engine.available_bytes());
  budget.has_own_host = engine.has_own_memory();
  if (budget.has_own_host)
    budget.host_bytes = least_of_ranks(session, available_host_bytes() / session.local_ranks());
  const std::filesystem::path checkpoints = std::filesystem::path(config.output.directory) / "checkpoints";
  budget.checkpoints = checkpoints.string();
  budget.checkpoint_bytes = free_bytes(checkpoints);
  budget.model = (std::filesystem::path(config.output.directory) / "model").string();
  const std::filesystem::path directory = activations_directory(config);
  budget.scratch = directory.string();
  const bool may_use_disk = config.activations.store == ActivationSetting::kNvme ||
                            config.activations.store == ActivationSetting::kAuto;
  if (may_use_disk) budget.scratch_bytes = free_scratch_bytes(session, directory);
  return budget;
}

}  // namespace

std::filesystem::path activations_directory(const Config& config) {
  if (!config.activations.directory.empty()) return config.activations.directory;
  for (const char* variable : {"SLURM_TMPDIR", "TMPDIR"})
    if (const char* folder = std::getenv(variable); folder != nullptr && *folder != '\0') return folder;
  return "/tmp";
}

std::string job_name() {
  for (const char* variable : {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"})
    if (const char* name = std::getenv(variable); name != nullptr && *name != '\0') return name;
  return "local";
}

TrainingPlan plan_training_job(const MpiSession& session, const Config& config, TrainingEngine& engine,
                               int64_t tokens, int64_t sequences, Scratch scratch, Checkpoints checkpoints) {
  TrainingTask task;
  task.shape = engine.config();
  task.pattern = attention_pattern(config);
  task.tokens = tokens;
  task.sequences = sequences;
  task.ranks = session.ranks();
  task.tile = config.run.token_tile > 0 ? config.run.token_tile : engine.default_tile();
  task.store = config.activations.store;
  task.every = config.activations.every;
  if (checkpoints == Checkpoints::kYes) {
    task.checkpoints = checkpoints_at_once(config.train);
    task.models = models_at_once(config.train);
  }
  TrainingBudget budget = budget_of(session, config, engine);
  const MemoryOfStep memory_of = [&](const ShardPlan& shards, int64_t tile, double every) {
    TrainingMemory memory = engine.memory(shards, tile, every);
    if (checkpoints == Checkpoints::kNo) memory.host_fixed.clear();
    return memory;
  };
  wait_for_all(session);
  double own_rate = 0;
  session.together([&] { own_rate = engine.measure_matmul_rate(0.5); });
  const double rate = spread_over_ranks(session, own_rate).mean * session.ranks();
  TrainingPlan plan;
  session.together([&] { plan = plan_training(task, budget, memory_of, rate); });
  std::optional<UserError> fault;
  if (plan.place == ActivationPlace::kNvme) {  // what needs no disk does not ask for it
    fault = fault_of_scratch(session, activations_directory(config), scratch);
    budget.scratch_bytes = free_scratch_bytes(session, activations_directory(config));
  }
  session.together([&] {
    plan = plan_training(task, budget, memory_of, rate);
    // Where nothing is said, the largest tile that fits.
    while (config.run.token_tile == 0 && !plan.fault.empty() && task.tile > kLeastTile) {
      task.tile /= 2;
      TrainingPlan smaller = plan_training(task, budget, memory_of, rate);
      if (smaller.fault.empty()) plan = std::move(smaller);
    }
  });
  if (plan.place == ActivationPlace::kNvme) plan.scratch_fault = fault;
  return plan;
}

std::unique_ptr<ActivationStore> make_activation_store(const MpiSession& session, const Config& config,
                                                       ActivationPlace place, const ActivationShape& shape) {
  std::unique_ptr<ActivationStore> store;
  if (place == ActivationPlace::kOff) return store;
  session.together([&] {
    if (place != ActivationPlace::kNvme) {
      store = std::make_unique<HostActivationStore>(shape);
      return;
    }
    const DiskBuffers buffers = disk_buffers(shape.layer_bytes());
    DiskStoreOptions options;
    options.directory = activations_directory(config);
    options.job = job_name();
    options.rank = session.rank();
    options.shape = shape;
    options.chunk_bytes = buffers.chunk_bytes;
    options.buffers = buffers.count;
    options.threads = buffers.threads;
    store = std::make_unique<DiskActivationStore>(options);
  });
  return store;
}

std::unique_ptr<ActivationStore> make_activation_store(const MpiSession& session, const Config& config,
                                                       const TrainingEngine& engine, const TrainingPlan& plan,
                                                       int64_t own_tokens) {
  if (engine.has_own_memory() && plan.place == ActivationPlace::kDevice) return nullptr;
  return make_activation_store(session, config, plan.place,
                               engine.stored_inputs_shape(own_tokens, plan.task.every));
}

void print_training_plan(const MpiSession& session, const Config& config) {
  use_threads(session, config);
  ModelConfig shape;
  session.together([&] { shape = model_shape(config); });
  const std::unique_ptr<TrainingEngine> engine =
      make_training_engine(session, config, shape, attention_pattern(config));
  const TrainingPlan plan = plan_training_job(session, config, *engine, config.train.sequence_tokens,
                                              config.train.accumulation, Scratch::kLeave);
  session.together([&] {
    if (session.is_root()) print_text(plan.table());
  });
  session.together([&] { plan.require(); });
}

}  // namespace longhalo

#include "app/training_plan.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>
#include <numeric>
#include <optional>
#include <sstream>

#include "core/error.hpp"
#include "core/text.hpp"
#include "model/kept_layers.hpp"
#include "model/prefill.hpp"
#include "telemetry/progress.hpp"

namespace longhalo {
namespace {

constexpr int64_t kSmallestTile = 64;
constexpr int kMostRanks = 1 << 16;
constexpr int64_t kChunkBytes = int64_t{2} << 20;
constexpr int64_t kLeastBuffers = 8, kMostBuffers = 256;
// HDF5's own structures, checksums, and each layer's beginning at a block.
constexpr int64_t kFileOverhead = int64_t{1} << 20;

int64_t sum_of(const std::vector<MemoryItem>& items) {
  return std::accumulate(items.begin(), items.end(), int64_t{0},
                         [](int64_t sum, const MemoryItem& item) { return sum + item.bytes; });
}

std::string megabytes(int64_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << static_cast<double>(bytes) / 1e6 << " MB";
  return out.str();
}

// What a place asks of each kind of memory, all items together.
struct Use {
  int64_t device = 0, host = 0, disk = 0;
};

Use use_of(const TrainingMemory& memory, const TrainingBudget& budget, ActivationPlace place) {
  Use use{memory.fixed_bytes(), budget.has_own_host ? memory.host_bytes() : 0, 0};
  // Where the device's memory is the host's, what is kept in the host's counts there.
  int64_t& host = budget.has_own_host ? use.host : use.device;
  switch (place) {
    case ActivationPlace::kOff:
      use.device += memory.everything.value_or(0);
      break;
    case ActivationPlace::kDevice:
      use.device += memory.group + memory.stored;
      break;
    case ActivationPlace::kHost:
      use.device += memory.group + memory.arriving;
      host += memory.stored;
      break;
    case ActivationPlace::kNvme:
      use.device += memory.group + memory.arriving;
      host += disk_buffers(memory.layer_input).bytes();
      use.disk = memory.stored + kFileOverhead;
      break;
  }
  return use;
}

// What is too little, or nothing.
std::string shortage(const Use& use, const TrainingBudget& budget) {
  if (use.device > budget.device_bytes)
    return text(megabytes(use.device), ", but ", budget.device_place, " has ", megabytes(budget.device_bytes),
                " for each rank");
  if (use.host > budget.host_bytes)
    return text(megabytes(use.host), " of host memory, but there are ", megabytes(budget.host_bytes),
                " for each rank");
  if (use.disk > budget.scratch_bytes)
    return text(megabytes(use.disk), " of disk, but ", budget.scratch, " has ",
                megabytes(budget.scratch_bytes), " for each rank");
  return {};
}

// Asks what fits, with some sizes changed.
class Fitting {
 public:
  Fitting(const TrainingTask& task, const TrainingBudget& budget, const MemoryOfStep& memory_of)
      : task_(task), budget_(budget), memory_of_(memory_of) {}

  bool fits(const TrainingTask& task, ActivationPlace place) const {
    const ShardPlan shards = plan_shards(task.shape, task.pattern, task.tokens, task.ranks);
    const TrainingMemory memory = memory_of_(shards, task.tile, task.every);
    return shortage(use_of(memory, budget_, place), budget_).empty();
  }

  std::string remedy(ActivationPlace place) const {
    std::string words;
    const auto offer = [&](const std::string& option) { words += (words.empty() ? "" : "; or ") + option; };
    for (const ActivationPlace other :
         {ActivationPlace::kDevice, ActivationPlace::kHost, ActivationPlace::kNvme})
      if (other != place && (other != ActivationPlace::kHost || budget_.has_own_host) && fits(task_, other))
        offer(text("set activations.store: ", name_of(other)));
    const ActivationPlace kept = place == ActivationPlace::kOff ? ActivationPlace::kDevice : place;
    if (const auto every = least_every(kept))
      offer(text("set activations.every: ", *every,
                 place == ActivationPlace::kOff ? " and activations.store: device" : ""));
    for (int64_t tile = task_.tile / 2; tile >= kSmallestTile; tile /= 2) {
      TrainingTask smaller = task_;
      smaller.tile = tile;
      if (!fits(smaller, place)) continue;
      offer(text("set run.token_tile: ", tile));
      break;
    }
    if (const auto ranks =
            with([&](TrainingTask& task, int64_t value) { task.ranks = static_cast<int>(value); }, place,
                 int64_t{2} * task_.ranks, kMostRanks))
      offer(text("use ", *ranks, " ranks, each with as much memory as these"));
    if (const int64_t tokens = most_tokens(place); tokens >= 2)
      offer(text("set train.sequence_tokens to at most about ", tokens));
    if (words.empty())
      words = "not even a short sequence fits: use a smaller model, or hosts with more memory";
    return words;
  }

 private:
  // The first value that fits: first, 2 * first, ... up to most.
  template <class Change>
  std::optional<int64_t> with(const Change& change, ActivationPlace place, int64_t first,
                              int64_t most) const {
    for (int64_t value = first; value <= most; value *= 2) {
      TrainingTask task = task_;
      change(task, value);
      if (fits(task, place)) return value;
    }
    return std::nullopt;
  }
  // The one that keeps the most inputs of those that fit, with few digits.
  std::optional<double> least_every(ActivationPlace place) const {
    const int64_t layers = task_.shape.layers;
    for (int64_t kept = KeptLayers(layers, task_.every).count() - 1; kept >= 1; --kept) {
      TrainingTask task = task_;
      task.every = std::ceil(100.0 * static_cast<double>(layers) / static_cast<double>(kept)) / 100;
      if (fits(task, place)) return task.every;
    }
    return std::nullopt;
  }
  int64_t most_tokens(ActivationPlace place) const {
    int64_t few = 0, many = task_.tokens;
    while (many - few > std::max<int64_t>(1, few / 128)) {
      TrainingTask task = task_;
      task.tokens = few + (many - few) / 2;
      (fits(task, place) ? few : many) = task.tokens;
    }
    return few;
  }

  const TrainingTask& task_;
  const TrainingBudget& budget_;
  const MemoryOfStep& memory_of_;
};

std::vector<ActivationPlace> candidates(const TrainingTask& task, const TrainingBudget& budget,
                                        const TrainingMemory& memory) {
  switch (task.store) {
    case ActivationSetting::kOff:
      if (!memory.everything)
        throw UserError("a training step on GPUs always makes activations again", "activations.store: off",
                        "choose device, host or nvme, or auto");
      return {ActivationPlace::kOff};
    case ActivationSetting::kDevice:
      return {ActivationPlace::kDevice};
    case ActivationSetting::kHost:
      return {ActivationPlace::kHost};
    case ActivationSetting::kNvme:
      return {ActivationPlace::kNvme};
    case ActivationSetting::kAuto:
      break;
  }
  std::vector<ActivationPlace> places;
  // With more than every: 1, off would take away the meaning of it.
  if (task.every == 1 && memory.everything) places.push_back(ActivationPlace::kOff);
  places.push_back(ActivationPlace::kDevice);
  if (budget.has_own_host) places.push_back(ActivationPlace::kHost);
  places.push_back(ActivationPlace::kNvme);
  return places;
}

void choose(TrainingPlan& plan, const TrainingMemory& memory) {
  std::string passed_over;
  const std::vector<ActivationPlace> places = candidates(plan.task, plan.budget, memory);
  for (const ActivationPlace place : places) {
    const std::string missing = shortage(use_of(memory, plan.budget, place), plan.budget);
    plan.place = place;
    plan.fault = missing;
    if (missing.empty()) break;
    passed_over += text(passed_over.empty() ? "" : "; ", name_of(place), " would need ", missing);
  }
  if (plan.task.store != ActivationSetting::kAuto) {
    plan.why = "as activations.store says";
  } else if (plan.fault.empty()) {
    plan.why = text(
        "activations.store auto: the first that fits", passed_over.empty() ? "" : text("; ", passed_over),
        plan.task.every > 1 && memory.everything ? "; off is left out because of activations.every" : "");
  } else {
    plan.why = text("activations.store auto: nothing fits; ", passed_over);
  }
}

}  // namespace

std::string_view name_of(ActivationPlace place) {
  constexpr std::array<std::string_view, 4> kNames = {"off", "device", "host", "nvme"};
  return kNames[static_cast<size_t>(place)];
}

int64_t checkpoints_at_once(const Config::Train& train) {
  // The last step has one, whatever else is written; the oldest goes when one more than is kept is whole.
  const int64_t written = 1 + (train.checkpoint_every > 0 ? (train.steps - 1) / train.checkpoint_every : 0);
  return std::min(written, train.checkpoint_keep + 1);
}

int64_t models_at_once(const Config::Train& train) {
  return train.save_every > 0 && train.save_every < train.steps ? 2 : 1;
}

DiskBuffers disk_buffers(int64_t layer_input_bytes) {
  DiskBuffers buffers;
  buffers.chunk_bytes = kChunkBytes;
  if (layer_input_bytes < kLeastBuffers * kChunkBytes) {
    // Small layers in smaller chunks, so that several threads share one.
    const int64_t eighth = layer_input_bytes / kLeastBuffers;
    constexpr int64_t kBlock = 4096, kSmallestChunk = int64_t{1} << 20;
    buffers.chunk_bytes = std::clamp((eighth + kBlock - 1) / kBlock * kBlock, kSmallestChunk, kChunkBytes);
  }
  const int64_t chunks = (layer_input_bytes + buffers.chunk_bytes - 1) / buffers.chunk_bytes;
  buffers.count = static_cast<int>(std::clamp(2 * chunks, kLeastBuffers, kMostBuffers));
  return buffers;
}

TrainingPlan plan_training(const TrainingTask& task, const TrainingBudget& budget,
                           const MemoryOfStep& memory_of, double matmul_rate) {
  TrainingPlan plan;
  plan.task = task;
  plan.budget = budget;
  plan.matmul_rate = matmul_rate;
  const ShardPlan shards = plan_shards(task.shape, task.pattern, task.tokens, task.ranks);
  for (int rank = 0; rank < task.ranks; ++rank)
    plan.tokens_per_rank = std::max(plan.tokens_per_rank, shards.shard(rank).size());
  const TrainingMemory memory = memory_of(shards, task.tile, task.every);
  choose(plan, memory);

  plan.items = memory.fixed;
  const Use use = use_of(memory, budget, plan.place);
  if (plan.place == ActivationPlace::kOff) {
    plan.items.push_back(
        {"activations: all that backward needs of every layer", memory.everything.value_or(0)});
  } else {
    plan.items.push_back({"activations: inputs of the layers that go backward", memory.group});
    const char* const kept = plan.place == ActivationPlace::kNvme ? "activations: buffers before the disk"
                                                                  : "activations: stored inputs of layers";
    const int64_t arriving = plan.place == ActivationPlace::kDevice ? 0 : memory.arriving;
    if (arriving > 0)
      plan.items.push_back({"activations: stored inputs of layers on their way back", arriving});
    if (const int64_t rest = use.device - memory.fixed_bytes() - memory.group - arriving; rest > 0)
      plan.items.push_back({kept, rest});
    if (budget.has_own_host) plan.host_items = memory.host_fixed;
    if (const int64_t rest = use.host - memory.host_bytes(); rest > 0)
      plan.host_items.push_back({kept, rest});
  }
  plan.disk_bytes = use.disk;
  plan.checkpoint_bytes = memory.checkpoint;
  plan.model_bytes = memory.checkpoint - trained_parameters(task.shape, task.pattern) * kOptimizerStateBytes;
  const Recompute again = plan.place == ActivationPlace::kOff ? Recompute::kNo : Recompute::kYes;
  plan.seconds = static_cast<double>(task.sequences) *
                 training_flops(task.shape, task.pattern, task.tokens, again, task.every).all() / matmul_rate;
  if (!plan.fault.empty()) plan.remedy = Fitting(plan.task, plan.budget, memory_of).remedy(plan.place);
  return plan;
}

int64_t TrainingPlan::bytes() const {
  return sum_of(items);
}

int64_t TrainingPlan::host_bytes() const {
  return sum_of(host_items);
}

std::string TrainingPlan::describe() const {
  return text(
      "plan: ", task.tokens, " tokens on ", task.ranks, " ranks, at most ", tokens_per_rank,
      " each, in tiles of ", task.tile, "; ", megabytes(bytes()), " of ", megabytes(budget.device_bytes),
      " of ", budget.device_place, " a rank",
      host_bytes() > 0 ? text(", ", megabytes(host_bytes()), " of host memory") : "",
      disk_bytes > 0
          ? text(", ", megabytes(disk_bytes), " of ", megabytes(budget.scratch_bytes), " in ", budget.scratch)
          : "",
      "; activations: ", name_of(place), ", ", why, "; a step about ", duration_text(seconds), " or more");
}

std::string TrainingPlan::table() const {
  std::ostringstream out;
  const auto row = [&](const std::string& name, int64_t amount, const std::string& meaning) {
    out << "  " << std::left << std::setw(56) << name << std::right << std::setw(15) << megabytes(amount)
        << (meaning.empty() ? "" : "  ") << meaning << '\n';
  };
  const auto written = [](int64_t count, int64_t bytes) {
    return count == 1 ? std::string()
                      : text(count, " of ", megabytes(bytes), ", the one being written included, ");
  };
  out << "plan of a training step: " << task.tokens << " tokens on " << task.ranks << " ranks, at most "
      << tokens_per_rank << " each, in tiles of " << task.tile << "; bands " << task.pattern.describe()
      << '\n';
  for (const MemoryItem& item : items)
    row(item.name, item.bytes, "");
  row("a rank in all", bytes(),
      text("of ", megabytes(budget.device_bytes), " of ", budget.device_place, " for each rank"));
  for (const MemoryItem& item : host_items)
    row("host memory: " + item.name, item.bytes, "");
  if (!host_items.empty())
    row("host memory in all", host_bytes(), text("of ", megabytes(budget.host_bytes), " for each rank"));
  row("disk: activations", disk_bytes,
      disk_bytes > 0 ? text("of ", megabytes(budget.scratch_bytes), " in ", budget.scratch, " for each rank")
                     : "");
  if (task.checkpoints > 0)
    row("disk: job checkpoints", task.checkpoints * checkpoint_bytes,
        text(written(task.checkpoints, checkpoint_bytes), "of all ranks together, in ", budget.checkpoints,
             budget.checkpoint_bytes < 0
                 ? ""
                 : text(", which has ", megabytes(budget.checkpoint_bytes), " free")));
  if (task.models > 0)
    row("disk: trained model", task.models * model_bytes,
        text(written(task.models, model_bytes), "in ", budget.model));
  out << "  activations: " << name_of(place) << ", every " << task.every << " (" << why << ")\n"
      << "  a step takes about " << duration_text(seconds)
      << " or more: its matrix products, what is computed again included, at the rate measured now\n";
  if (!fault.empty()) out << "  does not fit: needs " << fault << "\n  remedy: " << remedy << '\n';
  return out.str();
}

void TrainingPlan::require() const {
  // How much room there is in a folder that cannot be used is not known.
  if (scratch_fault && (fault.empty() || disk_bytes > budget.scratch_bytes)) throw UserError(*scratch_fault);
  if (fault.empty()) return;
  std::string words;
  for (const std::vector<MemoryItem>* list : {&items, &host_items})
    for (const MemoryItem& item : *list)
      words += text(words.empty() ? "" : ", ", item.name, " ", megabytes(item.bytes));
  throw UserError(text("a training step needs ", fault, " (", words, ")"),
                  text(task.tokens, " tokens on ", task.ranks, " ranks, activations.store ", name_of(place),
                       ", activations.every ", task.every, ", run.token_tile ", task.tile),
                  remedy);
}

}  // namespace longhalo

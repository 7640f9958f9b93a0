#include "model/training_memory.hpp"

#include <algorithm>
#include <numeric>

#include "model/kept_layers.hpp"
#include "model/layer_activations.hpp"
#include "model/sharded_optimizer.hpp"
#include "model/training_snapshot.hpp"

namespace longhalo {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kLossTileBytes = int64_t{64} << 20;  // a tile of logits, as cross_entropy() makes it
constexpr int64_t kLossTileRows = 64;                  // at least
constexpr int64_t kFlights = 4;                        // buckets on their way, each sent and received

int64_t sum_of(const std::vector<MemoryItem>& items) {
  return std::accumulate(items.begin(), items.end(), int64_t{0},
                         [](int64_t sum, const MemoryItem& item) { return sum + item.bytes; });
}

}  // namespace

int64_t trained_parameters(const ModelConfig& config, const AttentionPattern& pattern) {
  const auto strided = static_cast<int64_t>(pattern.strides().size());
  return config.parameters() + config.layers * (config.heads + strided * config.kv_size());
}

MostOfRanks most_of_ranks(const AttentionPattern& pattern, const ShardPlan& shards) {
  MostOfRanks most;
  const int64_t reach = std::min(pattern.exact_reach(), shards.tokens());
  for (int rank = 0; rank < shards.ranks(); ++rank) {
    const TokenRange shard = shards.shard(rank);
    most.tokens = std::max(most.tokens, shard.size());
    if (!shard.empty()) most.rows = std::max(most.rows, shard.size() + std::min(reach, shard.begin));
  }
  for (const int64_t stride : pattern.strides())
    most.segments += shards.tokens() / stride;
  return most;
}

int64_t TrainingMemory::fixed_bytes() const {
  return sum_of(fixed);
}

int64_t TrainingMemory::host_bytes() const {
  return sum_of(host_fixed);
}

TrainingMemory training_memory(const ModelConfig& config, const AttentionPattern& pattern,
                               const ShardPlan& shards, int64_t tile, double every) {
  const ModelConfig& c = config;
  const MostOfRanks most = most_of_ranks(pattern, shards);
  const int64_t parameters = trained_parameters(c, pattern);
  const int64_t owned = (parameters + shards.ranks() - 1) / shards.ranks();
  const int64_t bucket = std::min(parameters, ShardedOptimizer::kBucketElements);
  const int64_t stream = most.tokens * c.hidden * kFloat;
  const int64_t keys = 2 * (most.rows + most.segments) * c.kv_size() * kFloat;
  const int64_t n = std::min(tile, most.tokens);
  const int64_t values = LayerActivations::bytes(c, n);

  TrainingMemory memory;
  memory.fixed = {
      {"weights", parameters * kFloat},
      {"gradients", parameters * kFloat},
      {"optimizer: master weights, moments, summed gradients", 4 * owned * kFloat},
      {"optimizer: buckets on their way", 2 * kFlights * bucket * kFloat},
      {"job checkpoint while it is written",
       most_snapshot_bytes(c, static_cast<int64_t>(pattern.strides().size()), Dtype::kF32, shards.ranks())},
      {"residual stream and its gradients", 3 * stream},
      {"keys and values of a layer", keys},
      {"gradients of keys and values, own and arriving", 2 * keys},
      // Layer: 2 D-wide, 2 H*d, 3 F; LayerBackward: values, 3 D, 2 H*d, 4 F; the loss: 2 D.
      {"temporaries of a tile", values + n * (7 * c.hidden + 4 * c.q_size() + 7 * c.ffn) * kFloat},
      {"logits of the loss",
       std::min(n, std::max(kLossTileRows, kLossTileBytes / kFloat / c.vocabulary)) * c.vocabulary * kFloat}};
  memory.everything = c.layers * (stream + keys + LayerActivations::bytes(c, most.tokens));
  memory.checkpoint = parameters * (kFloat + kOptimizerStateBytes);
  memory.layer_input = stream;
  const KeptLayers kept(c.layers, every);
  memory.stored = kept.count() * stream;
  memory.group = kept.longest() * stream;
  return memory;
}

TrainingFlops training_flops(const ModelConfig& config, const AttentionPattern& pattern, int64_t tokens,
                             Recompute recompute, double every) {
  const ModelConfig& c = config;
  const auto count = static_cast<double>(tokens);
  const auto layers = static_cast<double>(c.layers);
  const auto down = static_cast<double>(c.hidden * c.ffn);
  const auto layer = static_cast<double>(c.hidden * (2 * c.q_size() + 2 * c.kv_size() + 3 * c.ffn));
  const auto head = static_cast<double>(c.hidden * c.vocabulary);
  // A head dimension and a query head.
  const double pairs =
      static_cast<double>(c.q_size()) * layers * static_cast<double>(sequence_visible_pairs(pattern, tokens));
  TrainingFlops flops;
  flops.products = 6 * count * (layers * layer + head);
  flops.attention = 14 * pairs;
  if (recompute == Recompute::kNo) return flops;
  // Each layer forward again as it goes back, all but its last product; before that all layers of a group but
  // the last, to have their inputs.
  const auto groups = static_cast<double>(KeptLayers(c.layers, every).count());
  flops.products_again = 2 * count * (layers * (layer - down) + (layers - groups) * layer);
  flops.attention_again = 4 * pairs * (2 - groups / layers);
  return flops;
}

}  // namespace longhalo

#include "model/device_training_memory.hpp"

#include <algorithm>
#include <vector>

#include "kernels/embedding/embedding.hpp"
#include "kernels/landmark_pool/rotate_and_pool.hpp"
#include "model/device_layer.hpp"
#include "model/device_layer_backward.hpp"
#include "model/device_weights.hpp"
#include "model/kept_layers.hpp"
#include "model/training_snapshot.hpp"

namespace longhalo {
namespace {

constexpr int64_t kBf16 = 2, kFloat = 4;
constexpr int64_t kTileLogits = int64_t{1} << 28;  // 1 GiB in fp32, and half of it for their gradient

int64_t pooling_bytes(const ModelConfig& c, const std::vector<int64_t>& strides, int64_t n) {
  std::vector<PoolTarget> targets;
  std::vector<PoolGradient> gradients;
  float unused = 0;  // stands for wanted gradients
  for (const int64_t stride : strides) {
    targets.emplace_back().stride = stride;
    PoolGradient& gradient = gradients.emplace_back();
    gradient.stride = stride;
    gradient.d_landmark_query = &unused;
  }
  return rotate_and_pool_workspace({c.kv_heads, c.head_dim, nullptr, targets}, n) +
         std::max(rotate_and_pool_backward_workspace({c.kv_heads, c.head_dim, nullptr, gradients}, n),
                  embedding_backward_workspace(n, c.hidden));
}

// As attention_backward_workspace() bounds it.
int64_t attention_bytes(const ModelConfig& c, int64_t n, int64_t rows, const MostOfRanks& most,
                        size_t strides) {
  constexpr int64_t kBandBytes = 64'000'000;
  const int64_t padded = (n + 127) / 128 * 128;
  const int64_t exact = std::max(kBandBytes, 8 * rows * c.kv_size());
  const int64_t strided = std::max(kBandBytes, 8 * most.segments * c.kv_size());
  return 8 * padded * c.heads * (c.head_dim + 2) + exact + static_cast<int64_t>(strides) * strided;
}

}  // namespace

int64_t device_loss_rows(const ModelConfig& config, int64_t tile) {
  return std::clamp<int64_t>(kTileLogits / config.vocabulary, 1, tile);
}

TrainingMemory device_training_memory(const ModelConfig& config, const AttentionPattern& pattern,
                                      const ShardPlan& shards, int64_t tile, double every) {
  const ModelConfig& c = config;
  const MostOfRanks most = most_of_ranks(pattern, shards);
  const std::vector<int64_t> strides = pattern.strides();
  const auto strided = static_cast<int64_t>(strides.size());
  const int64_t ranks = shards.ranks(), tokens = most.tokens, n = std::clamp<int64_t>(tokens, 1, tile);
  const int64_t vectors = 2 * c.hidden + c.heads + strided * c.kv_size();
  const int64_t parameters = c.parameters() + c.layers * (c.heads + strided * c.kv_size());
  const int64_t layer = c.hidden * (2 * c.q_size() + 2 * c.kv_size() + 3 * c.ffn) + vectors;
  const int64_t embedding = c.vocabulary * c.hidden,
                ends = (c.tied_embeddings ? 1 : 2) * embedding + c.hidden;
  const int64_t section = std::max(layer, embedding);  // the largest that is reduced at once
  const int64_t owned = (parameters + ranks - 1) / ranks;
  const int64_t stream = tokens * c.hidden * kBf16;
  const int64_t row = 2 * c.kv_size();  // elements of a token's key and value
  const int64_t reach = std::min(pattern.exact_reach(), shards.tokens());
  const int64_t loss_rows = device_loss_rows(c, n);

  TrainingMemory memory;
  memory.fixed = {
      {"weights in bf16", device_weights_bytes(c, Precision::kBf16, strided)},
      {"gradients of two layers, embedding and head",
       (ends + std::min(c.layers, kGradientLayersAtOnce) * layer) * kFloat},
      {"optimizer: master weights, moments, summed gradients", 4 * owned * kFloat},
      {"optimizer: gradients and weights on their way",
       (ranks - 1) * ((section + ranks - 1) / ranks) * kFloat + section * kBf16 + vectors * kFloat},
      {"residual stream and its gradients", 4 * stream},
      {"tokens, labels, documents", tokens * 16},
      {"keys and values of a layer",
       (most.rows + most.segments) * row * kBf16 + most.segments * c.kv_heads * kFloat},
      // Own and arrived: of the window's reach, and of each landmark from every other rank.
      {"gradients of keys and values",
       (most.rows + most.segments + reach + most.segments) * row * kFloat + tokens * row * kBf16},
      {"temporaries of a tile",
       DeviceLayer::bytes(c, Precision::kBf16, n) + DeviceLayerBackward::bytes(c, n) +
           attention_bytes(c, n, std::min(n + reach, most.rows), most, strides.size()) +
           pooling_bytes(c, strides, tokens)},
      // The fastest way is looked for while all else is there; sums go to scratch meanwhile.
      {"choosing matrix products", std::max(embedding, 2 * c.ffn * c.hidden) * kFloat},
      {"logits of the loss", loss_rows * (c.vocabulary * (kFloat + kBf16) + 2 * c.hidden * kBf16 + 8)}};
  // Vectors are fp32 in the files, too.
  const int64_t in_fp32 = c.layers * vectors + c.hidden;
  memory.checkpoint = parameters * (kBf16 + 3 * kFloat) + in_fp32 * (kFloat - kBf16);
  memory.layer_input = stream;
  const KeptLayers kept(c.layers, every);
  memory.stored = kept.count() * stream;
  memory.group = (kept.longest() - 1) * stream;
  memory.arriving = 2 * stream;
  memory.host_fixed = {
      {"job checkpoint while it is written", most_snapshot_bytes(c, strided, Dtype::kBF16, shards.ranks())}};
  return memory;
}

}  // namespace longhalo

#include "model/prefill.hpp"

#include <algorithm>

#include "core/clock.hpp"
#include "core/waiting.hpp"

namespace longhalo {
namespace {

int64_t reach_within(const AttentionPattern& pattern, int64_t tokens) {
  return std::min(pattern.exact_reach(), tokens);
}

}  // namespace

ShardPlan plan_shards(const ModelConfig& config, const AttentionPattern& pattern, int64_t tokens, int ranks) {
  const double products =
      2.0 * static_cast<double>(config.layer_parameters()) / static_cast<double>(config.layers);
  const auto a_key = static_cast<double>(4 * config.q_size());
  return {tokens, ranks, shard_alignment(pattern.strides()), [&](int64_t position) {
            int64_t keys = 0;
            for (const Band& band : pattern.bands)
              keys += visible_keys(band, position).count();
            return products + a_key * static_cast<double>(keys);
          }};
}

Prefill::Prefill(const MpiSession& session, const Weights& weights, const AttentionPattern& pattern,
                 const ShardPlan& shards, int64_t tile)
    : session_(session),
      weights_(weights),
      pattern_(pattern),
      strides_(pattern.strides()),
      shards_(shards),
      shard_(shards.shard(session.rank())),
      context_range_{shards.tokens() - reach_within(pattern, shards.tokens()), shards.tokens()},
      layer_(weights, std::clamp<int64_t>(shard_.size(), 1, tile)),
      residual_(shard_.size() * weights.config.hidden, "the residual stream of the shard"),
      halo_(session, halo_plan(shards, session.rank(), reach_within(pattern, shards.tokens())),
            weights.config.kv_size()),
      context_rows_(session, shards, context_range_, weights.config.kv_size()) {
  const int64_t rows = halo_.plan().halo.size() + shard_.size();
  k_ = HostBuffer<float>(rows * weights.config.kv_size(), "keys of a layer");
  v_ = HostBuffer<float>(rows * weights.config.kv_size(), "values of a layer");
  for (const int64_t stride : strides_) {
    gathers_.push_back(std::make_unique<LandmarkGather>(session, shards, stride, weights.config.kv_size()));
    landmarks_.emplace_back(weights.config.kv_size()).reset(0, gathers_.back()->segments());
    open_.emplace_back(weights.config.kv_heads, weights.config.head_dim);
  }
}

std::optional<Context> Prefill::run(std::span<const int32_t> tokens, KeepContext keep,
                                    const PrefillProgress& progress) {
  check(static_cast<int64_t>(tokens.size()) == shards_.tokens(),
        "the tokens are the whole sequence of the shard plan");
  const Stopwatch watch;
  progress_ = progress;
  std::optional<Context> context;
  if (keep == KeepContext::kYes) context.emplace(weights_.config, pattern_);

  embed_tokens(weights_,
               tokens.subspan(static_cast<size_t>(shard_.begin), static_cast<size_t>(shard_.size())),
               residual_.data());
  for (int64_t layer = 0; layer < weights_.config.layers; ++layer) {
    at_layer(layer);
    run_layer(layer, context ? &*context : nullptr);
  }

  if (context) context->advance(shards_.tokens());
  cost_.halo = halo_.cost();
  cost_.context = context_rows_.cost();
  for (const auto& gather : gathers_)
    cost_.landmarks += gather->cost();
  cost_.layers = layer_.times();
  cost_.seconds += watch.seconds();
  return context;
}

void Prefill::run_layer(int64_t layer, Context* context) {
  make_keys(layer);

  const TokenRange halo = halo_.plan().halo;
  halo_.start({k_.data(), v_.data(), halo.begin});
  for (size_t band = 0; band < gathers_.size(); ++band)
    gathers_[band]->start(landmarks_[band].k_row(0), landmarks_[band].v_row(0));
  landmarks_arrived_ = false;

  // The first tokens of a shard see into the halo; all others have their whole window in the shard.
  const int64_t interior =
      halo.empty() ? shard_.begin
                   : shard_.begin + std::min(shard_.size(), reach_within(pattern_, shards_.tokens()));
  attend_tiles(layer, {interior, shard_.end}, shard_);
  halo_.wait();
  attend_tiles(layer, {shard_.begin, interior}, {halo.begin, shard_.end});
  if (!landmarks_arrived_)  // a rank without tokens
    for (const auto& gather : gathers_)
      gather->wait();

  if (context != nullptr) keep_layer(context->layer(layer));
}

// Keys and values of the whole shard, and the landmarks of its segments. Nothing here needs another rank.
void Prefill::make_keys(int64_t layer) {
  const int64_t row = weights_.config.kv_size();
  for (LandmarkPoolState& open : open_)
    open.clear();
  std::vector<int64_t> next_segment;
  for (const auto& gather : gathers_)
    next_segment.push_back(gather->own().begin);

  for (int64_t at = shard_.begin; at < shard_.end; at += layer_.tile()) {
    const int64_t n = std::min(layer_.tile(), shard_.end - at);
    float* k = k_.data() + (at - halo_.plan().halo.begin) * row;
    float* v = v_.data() + (at - halo_.plan().halo.begin) * row;
    layer_.project_keys(layer, n, residual_.data() + (at - shard_.begin) * weights_.config.hidden, k, v);
    for (size_t band = 0; band < strides_.size(); ++band) {
      int64_t& next = next_segment[band];
      next += layer_.summarise(layer, static_cast<int64_t>(band), strides_[band], n, k, v, next, open_[band],
                               landmarks_[band].k_row(next), landmarks_[band].v_row(next));
    }
    layer_.rotate_keys(n, at, k);
    done_ += n;
    if (progress_) progress_(done_, 2 * shard_.size() * weights_.config.layers);
  }
}

// Attention and MLP of the shard's tokens `queries`; exact keys outside `visible` are not touched.
void Prefill::attend_tiles(int64_t layer, TokenRange queries, TokenRange visible) {
  if (queries.empty()) return;
  if (!landmarks_arrived_) {
    for (const auto& gather : gathers_)
      gather->wait();
    landmarks_arrived_ = true;
  }
  const int64_t offset = (visible.begin - halo_.plan().halo.begin) * weights_.config.kv_size();
  const BandKeys<float> exact{{}, k_.data() + offset, v_.data() + offset, visible.begin, visible.size()};
  const std::vector<BandKeys<float>> bands = band_keys(pattern_, exact, landmarks_);
  for (int64_t at = queries.begin; at < queries.end; at += layer_.tile()) {
    const int64_t n = std::min(layer_.tile(), queries.end - at);
    layer_.attend(layer, n, at, bands, residual_.data() + (at - shard_.begin) * weights_.config.hidden);
    halo_.poll();
    done_ += n;
    if (progress_) progress_(done_, 2 * shard_.size() * weights_.config.layers);
  }
}

// Every rank gets what a later token needs of this layer.
void Prefill::keep_layer(LayerContext& kept) {
  kept.exact.reset(context_range_.begin, context_range_.size());
  context_rows_.start(
      {k_.data(), v_.data(), halo_.plan().halo.begin},
      {kept.exact.k_row(context_range_.begin), kept.exact.v_row(context_range_.begin), context_range_.begin});
  context_rows_.wait();

  const int last_owner = shards_.tokens() == 0 ? 0 : shards_.owner(shards_.tokens() - 1);
  for (size_t band = 0; band < strides_.size(); ++band) {
    kept.landmarks[band] = landmarks_[band].clone();
    LandmarkPoolState& open = kept.open[band];
    open = open_[band];
    open.tokens = broadcast_count(session_, open.tokens, last_owner);
    for (std::vector<float>* part : {&open.m, &open.l, &open.k_sum, &open.v_sum})
      broadcast_bytes(session_, part->data(), static_cast<int64_t>(part->size() * sizeof(float)), last_owner);
  }
}

Prefill::Memory Prefill::memory(const ModelConfig& config, const AttentionPattern& pattern,
                                const ShardPlan& shards, int64_t tile) {
  constexpr int64_t kFloat = sizeof(float);
  int64_t most_tokens = 0, most_rows = 0;
  for (int rank = 0; rank < shards.ranks(); ++rank) {
    const TokenRange shard = shards.shard(rank);
    const int64_t halo = shard.empty() ? 0 : std::min(reach_within(pattern, shards.tokens()), shard.begin);
    most_tokens = std::max(most_tokens, shard.size());
    most_rows = std::max(most_rows, shard.size() + halo);
  }
  Memory memory;
  memory.residual = most_tokens * config.hidden * kFloat;
  memory.keys = 2 * most_rows * config.kv_size() * kFloat;
  memory.workspace =
      std::min(tile, most_tokens) * (config.hidden + 2 * config.q_size() + 3 * config.ffn) * kFloat;
  for (const int64_t stride : pattern.strides())
    memory.workspace += 2 * (shards.tokens() / stride) * config.kv_size() * kFloat;
  return memory;
}

}  // namespace longhalo

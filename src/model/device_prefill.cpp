#include "model/device_prefill.hpp"

#include <algorithm>

#include "core/clock.hpp"
#include "core/error.hpp"
#include "core/waiting.hpp"

namespace longhalo {
namespace {

// Tiles that the host may be ahead of the device: tens of milliseconds at least, and fewer kernels than a
// launch queue takes.
constexpr size_t kMostTilesAhead = 48;

int64_t reach_within(const AttentionPattern& pattern, int64_t tokens) {
  return std::min(pattern.exact_reach(), tokens);
}

int64_t pool_workspace_bytes(const ModelConfig& c, std::span<const int64_t> strides, int64_t n) {
  std::vector<PoolTarget> bands;
  for (const int64_t stride : strides)
    bands.emplace_back().stride = stride;
  return rotate_and_pool_workspace({c.kv_heads, c.head_dim, nullptr, bands}, n);
}

int64_t row_bytes(int64_t row_elements) {
  return row_elements * static_cast<int64_t>(sizeof(BFloat16));
}

}  // namespace

DevicePrefill::DevicePrefill(const DeviceRoom& room, const DeviceWeights& weights,
                             const AttentionPattern& pattern, const ShardPlan& shards, int64_t tile)
    : room_(room),
      weights_(weights),
      pattern_(pattern),
      strides_(pattern.strides()),
      shards_(shards),
      shard_(shards.shard(room.transport.rank())),
      context_range_{shards.tokens() - reach_within(pattern, shards.tokens()), shards.tokens()},
      row_elements_(2 * weights.config.kv_size()),
      compute_(room.device.compute()),
      communication_(room.device.communication()),
      layer_(weights, std::clamp<int64_t>(shard_.size(), 1, tile), room.matmul, compute_),
      clock_(compute_),
      residual_(shard_.size() * weights.config.hidden, "the residual stream of the shard", compute_),
      halo_(room.transport, halo_plan(shards, room.transport.rank(), reach_within(pattern, shards.tokens())),
            row_bytes(row_elements_), Timing::kOn),
      pool_workspace_(pool_workspace_bytes(weights.config, strides_, shard_.size()), "pooling", compute_),
      context_rows_(room.transport, shards, context_range_, row_bytes(row_elements_), Timing::kOn) {
  layer_.set_clock(&clock_);
  kv_ = DeviceBuffer<BFloat16>((halo_.plan().halo.size() + shard_.size()) * row_elements_,
                               "keys and values of a layer", compute_);
  for (const int64_t stride : strides_)
    gathers_.emplace_back(room.transport, shards, stride, row_bytes(row_elements_), Timing::kOn);
}

std::optional<DeviceContext> DevicePrefill::run(std::span<const int32_t> tokens, KeepContext keep,
                                                const PrefillProgress& progress) {
  check(static_cast<int64_t>(tokens.size()) == shards_.tokens(),
        "the tokens are the whole sequence of the shard plan");
  const Stopwatch watch;
  const int64_t total = 2 * shard_.size() * weights_.config.layers;
  run_ahead_.emplace(compute_, kMostTilesAhead, [&](int64_t done) {
    if (progress) progress(done, total);
  });
  std::optional<DeviceContext> context;
  if (keep == KeepContext::kYes) {
    context.emplace(weights_.config, pattern_, compute_);
    context->exact().reset(context_range_.begin, context_range_.size(), compute_);
    for (size_t band = 0; band < strides_.size(); ++band)
      context->landmarks(static_cast<int64_t>(band)).reset(0, gathers_[band].segments(), compute_);
  } else if (landmarks_.empty()) {
    const int64_t state = pool_state_floats(weights_.config.kv_heads, weights_.config.head_dim);
    for (const DeviceLandmarkGather& gather : gathers_) {
      landmarks_.emplace_back(gather.segments() * row_elements_, "landmarks of a layer", compute_);
      open_.emplace_back(state, "pooling state", compute_);
    }
  }

  const std::span<const int32_t> own =
      tokens.subspan(static_cast<size_t>(shard_.begin), static_cast<size_t>(shard_.size()));
  check(std::all_of(own.begin(), own.end(),
                    [&](int32_t token) { return token >= 0 && token < weights_.config.vocabulary; }),
        "a token id lies inside the vocabulary");
  DeviceBuffer<int32_t> own_tokens;
  if (!own.empty()) {
    own_tokens = to_device<int32_t>(own, "tokens", compute_);
    layer_.embed(shard_.size(), own_tokens.data(), residual_.data());
  }
  for (int64_t layer = 0; layer < weights_.config.layers; ++layer) {
    at_layer(layer);
    run_layer(layer, context ? &*context : nullptr);
    room_.transport.check_health();
  }
  clock_.enter(Phase::kNone);
  if (context) {
    const int last_owner = shards_.tokens() == 0 ? 0 : shards_.owner(shards_.tokens() - 1);
    DeviceBuffer<float>& open = context->open_states();
    if (!open.empty()) room_.transport.broadcast(open.data(), open.bytes(), last_owner, compute_);
    context->advance(shards_.tokens());
  }
  run_ahead_->finish();
  wait_for_stream(compute_, "the prefill on this rank's GPU");
  wait_for_stream(communication_, "the prefill's messages on this rank's GPU");
  room_.transport.check_health();

  cost_.halo = halo_.cost();
  cost_.context = context_rows_.cost();
  cost_.landmarks = {};
  for (DeviceLandmarkGather& gather : gathers_)
    cost_.landmarks += gather.cost();
  cost_.layers = clock_.times();
  cost_.seconds += watch.seconds();
  return context;
}

void DevicePrefill::run_layer(int64_t layer, DeviceContext* context) {
  landmark_rows_.clear();
  for (size_t band = 0; band < strides_.size(); ++band)
    landmark_rows_.push_back(context != nullptr ? context->landmarks(static_cast<int64_t>(band)).rows(layer)
                                                : landmarks_[band].data());
  make_keys(layer, context);
  start_messages(layer, context);

  // The first tokens of a shard see into the halo; all others have their whole window in the shard.
  const TokenRange halo = halo_.plan().halo;
  const int64_t interior =
      halo.empty() ? shard_.begin
                   : shard_.begin + std::min(shard_.size(), reach_within(pattern_, shards_.tokens()));
  const bool sees_others = std::any_of(gathers_.begin(), gathers_.end(),
                                       [](const auto& gather) { return gather.own().begin > 0; });
  attend_tiles(layer, {interior, shard_.end}, shard_, [&] {
    if (sees_others) wait_for_landmarks();
  });
  attend_tiles(layer, {shard_.begin, interior}, {halo.begin, shard_.end}, [&] {
    wait_for_landmarks();
    wait_for_halo();
  });

  // The next layer overwrites what this one sends.
  wait_for_landmarks();
  wait_for_halo();
  if (context != nullptr) {
    clock_.enter(Phase::kNone);
    context_rows_.make_wait(compute_);
  }
}

// Keys and values of the whole shard, and the landmarks of its segments. Nothing here needs another rank.
void DevicePrefill::make_keys(int64_t layer, DeviceContext* context) {
  if (shard_.empty()) return;
  BFloat16* own_rows = kv_.data() + halo_.plan().halo.size() * row_elements_;
  for (int64_t at = 0; at < shard_.size(); at += layer_.tile()) {
    const int64_t n = std::min(layer_.tile(), shard_.size() - at);
    layer_.project_keys(layer, n, residual_.data() + at * weights_.config.hidden,
                        own_rows + at * row_elements_);
    run_ahead_->queued(n);
  }
  std::vector<PoolTarget> targets;
  for (size_t band = 0; band < strides_.size(); ++band)
    targets.push_back(
        {strides_[band], nullptr, landmark_rows_[band], 0,
         context != nullptr ? context->open(layer, static_cast<int64_t>(band)) : open_[band].data()});
  rotate_and_pool(compute_, layer_.pooling(layer, targets), shard_.size(), shard_.begin, own_rows,
                  pool_workspace_.data());
}

// In the order in which they are needed: the interior queries see landmarks, the first tiles the halo, and
// the context's rows only later tokens.
void DevicePrefill::start_messages(int64_t layer, DeviceContext* context) {
  clock_.enter(Phase::kNone);
  for (size_t band = 0; band < gathers_.size(); ++band)
    gathers_[band].start(landmark_rows_[band], compute_, communication_);
  halo_.start(kv_.data(), halo_.plan().halo.begin, compute_, communication_);
  if (context != nullptr)
    context_rows_.start(kv_.data() + halo_.plan().halo.size() * row_elements_, shard_.begin,
                        context->exact().rows(layer), compute_, communication_);
  landmarks_in_flight_ = true;
  halo_in_flight_ = true;
}

void DevicePrefill::wait_for_landmarks() {
  if (!landmarks_in_flight_) return;
  clock_.enter(Phase::kNone);
  for (DeviceLandmarkGather& gather : gathers_)
    gather.make_wait(compute_);
  landmarks_in_flight_ = false;
}

void DevicePrefill::wait_for_halo() {
  if (!halo_in_flight_) return;
  clock_.enter(Phase::kNone);
  halo_.make_wait(compute_);
  halo_in_flight_ = false;
}

// Attention and MLP of the shard's tokens `queries`; exact keys outside `visible` do not exist for them.
// `before_attention` is called once, when the first tile's queries are queued.
void DevicePrefill::attend_tiles(int64_t layer, TokenRange queries, TokenRange visible,
                                 const std::function<void()>& before_attention) {
  if (queries.empty()) return;
  const TokenRange halo = halo_.plan().halo;
  const BandKeys<BFloat16> exact = rows_as_band({}, kv_.data() + (visible.begin - halo.begin) * row_elements_,
                                                row_elements_, visible.begin, visible.size());
  std::vector<BandKeys<BFloat16>> landmarks;  // up to this shard's own: no query here sees later ones
  for (size_t band = 0; band < gathers_.size(); ++band)
    landmarks.push_back(rows_as_band({}, landmark_rows_[band], row_elements_, 0, gathers_[band].own().end));
  const std::vector<BandKeys<BFloat16>> bands = band_keys(pattern_, exact, landmarks);
  for (int64_t at = queries.begin; at < queries.end; at += layer_.tile()) {
    const int64_t n = std::min(layer_.tile(), queries.end - at);
    BFloat16* x = residual_.data() + (at - shard_.begin) * weights_.config.hidden;
    layer_.project_queries(layer, n, x, at);
    if (at == queries.begin) before_attention();
    layer_.attend(layer, n, bands, x);
    run_ahead_->queued(n);
  }
}

DevicePrefill::Memory DevicePrefill::memory(const ModelConfig& config, Precision precision,
                                            const AttentionPattern& pattern, const ShardPlan& shards,
                                            int64_t tile) {
  int64_t most_tokens = 0, most_rows = 0;
  for (int rank = 0; rank < shards.ranks(); ++rank) {
    const TokenRange shard = shards.shard(rank);
    const int64_t halo = shard.empty() ? 0 : std::min(reach_within(pattern, shards.tokens()), shard.begin);
    most_tokens = std::max(most_tokens, shard.size());
    most_rows = std::max(most_rows, shard.size() + halo);
  }
  const std::vector<int64_t> strides = pattern.strides();
  Memory memory;
  memory.residual = row_bytes(most_tokens * config.hidden);
  memory.keys = row_bytes(most_rows * 2 * config.kv_size());
  for (const int64_t stride : strides)
    memory.landmarks += row_bytes(shards.tokens() / stride * 2 * config.kv_size());
  memory.workspace = DeviceLayer::bytes(config, precision, std::clamp<int64_t>(most_tokens, 1, tile)) +
                     pool_workspace_bytes(config, strides, most_tokens) +
                     most_tokens * static_cast<int64_t>(sizeof(int32_t)) +
                     row_bytes(std::min(tile, most_tokens) * config.hidden);  // choosing matrix products
  return memory;
}

}  // namespace longhalo

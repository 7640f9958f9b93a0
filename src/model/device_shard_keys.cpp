#include "model/device_shard_keys.hpp"

#include <algorithm>

namespace longhalo {
namespace {

int64_t reach_within(const AttentionPattern& pattern, int64_t tokens) {
  return std::min(pattern.exact_reach(), tokens);
}

}  // namespace

DeviceShardKeys::DeviceShardKeys(const DeviceRoom& room, const ModelConfig& config,
                                 const AttentionPattern& pattern, const ShardPlan& shards)
    : compute_(room.device.compute()),
      communication_(room.device.communication()),
      pattern_(pattern),
      strides_(pattern.strides()),
      shard_(shards.shard(room.transport.rank())),
      row_elements_(2 * config.kv_size()),
      halo_(room.transport, halo_plan(shards, room.transport.rank(), reach_within(pattern, shards.tokens())),
            row_elements_ * int64_t{sizeof(BFloat16)}, Timing::kOn) {
  const bool has_halo = !plan().halo.empty();
  interior_begin_ =
      shard_.begin + (has_halo ? std::min(shard_.size(), reach_within(pattern, shards.tokens())) : 0);
  kv_ = DeviceBuffer<BFloat16>(rows() * row_elements_, "keys and values of a layer", compute_);
  std::vector<PoolTarget> targets;
  for (const int64_t stride : strides_) {
    targets.emplace_back().stride = stride;
    const DeviceLandmarkGather& gather = gathers_.emplace_back(
        room.transport, shards, stride, row_elements_ * int64_t{sizeof(BFloat16)}, Timing::kOn);
    landmarks_.emplace_back(gather.segments() * row_elements_, "landmarks of a layer", compute_);
    lse_.emplace_back(gather.segments() * config.kv_heads, "sums of landmarks", compute_);
    open_.emplace_back(pool_state_floats(config.kv_heads, config.head_dim), "pooling state", compute_);
  }
  workspace_ = DeviceBuffer<uint8_t>(
      rotate_and_pool_workspace({config.kv_heads, config.head_dim, nullptr, targets}, shard_.size()),
      "pooling", compute_);
}

void DeviceShardKeys::start(DeviceLayer& layer, int64_t index, const BFloat16* x) {
  check(!landmarks_in_flight_ && !halo_in_flight_,
        "the keys of a layer are waited for before the next one's");
  if (!shard_.empty()) {
    BFloat16* own = kv_.data() + plan().halo.size() * row_elements_;
    for (int64_t at = 0; at < shard_.size(); at += layer.tile())
      layer.project_keys(index, std::min(layer.tile(), shard_.size() - at), x + at * layer.config().hidden,
                         own + at * row_elements_);
    std::vector<PoolTarget> targets;
    for (size_t band = 0; band < strides_.size(); ++band)
      targets.push_back(
          {strides_[band], nullptr, landmarks_[band].data(), 0, open_[band].data(), lse_[band].data()});
    rotate_and_pool(compute_, layer.pooling(index, targets), shard_.size(), shard_.begin, own,
                    workspace_.data());
  }
  for (size_t band = 0; band < gathers_.size(); ++band)
    gathers_[band].start(landmarks_[band].data(), compute_, communication_);
  halo_.start(kv_.data(), plan().halo.begin, compute_, communication_);
  landmarks_in_flight_ = halo_in_flight_ = true;
}

void DeviceShardKeys::wait_landmarks() {
  if (!std::exchange(landmarks_in_flight_, false)) return;
  for (DeviceLandmarkGather& gather : gathers_)
    gather.make_wait(compute_);
}

void DeviceShardKeys::wait_halo() {
  if (std::exchange(halo_in_flight_, false)) halo_.make_wait(compute_);
}

CommCost DeviceShardKeys::landmark_cost() {
  CommCost cost;
  for (DeviceLandmarkGather& gather : gathers_)
    cost += gather.cost();
  return cost;
}

std::vector<BandKeys<BFloat16>> DeviceShardKeys::bands(TokenRange exact) const {
  std::vector<BandKeys<BFloat16>> landmarks;
  for (size_t band = 0; band < gathers_.size(); ++band)
    landmarks.push_back(
        rows_as_band({}, landmarks_[band].data(), row_elements_, 0, gathers_[band].own().end));
  return band_keys(pattern_, rows_as_band({}, row(exact.begin), row_elements_, exact.begin, exact.size()),
                   landmarks);
}

}  // namespace longhalo

#include "model/shard_keys.hpp"

#include <algorithm>

namespace longhalo {
namespace {

int64_t reach_within(const AttentionPattern& pattern, int64_t tokens) {
  return std::min(pattern.exact_reach(), tokens);
}

}  // namespace

ShardKeys::ShardKeys(const MpiSession& session, const ModelConfig& config, const AttentionPattern& pattern,
                     const ShardPlan& shards)
    : pattern_(pattern),
      strides_(pattern.strides()),
      shard_(shards.shard(session.rank())),
      row_(config.kv_size()),
      halo_(session, halo_plan(shards, session.rank(), reach_within(pattern, shards.tokens())), row_) {
  const bool has_halo = !halo_.plan().halo.empty();
  interior_begin_ =
      shard_.begin + (has_halo ? std::min(shard_.size(), reach_within(pattern, shards.tokens())) : 0);
  for (const int64_t stride : strides_) {
    gathers_.push_back(std::make_unique<LandmarkGather>(session, shards, stride, row_));
    open_.emplace_back(config.kv_heads, config.head_dim);
  }
  keys_ = make_layer();
}

LayerKeys ShardKeys::make_layer() const {
  LayerKeys keys{HostBuffer<float>(rows() * row_, "keys of a layer"),
                 HostBuffer<float>(rows() * row_, "values of a layer"),
                 {}};
  for (const auto& gather : gathers_)
    keys.landmarks.emplace_back(row_).reset(0, gather->segments());
  return keys;
}

void ShardKeys::start(Layer& layer, int64_t index, const float* x) {
  std::vector<int64_t> next_segment;
  for (size_t band = 0; band < strides_.size(); ++band) {
    open_[band].clear();
    next_segment.push_back(gathers_[band]->own().begin);
  }
  for (int64_t at = shard_.begin; at < shard_.end; at += layer.tile()) {
    const int64_t n = std::min(layer.tile(), shard_.end - at);
    layer.project_keys(index, n, x + (at - shard_.begin) * layer.config().hidden, k_row(at), v_row(at));
    for (size_t band = 0; band < strides_.size(); ++band) {
      int64_t& next = next_segment[band];
      next +=
          layer.summarise(index, static_cast<int64_t>(band), strides_[band], n, k_row(at), v_row(at), next,
                          open_[band], keys_.landmarks[band].k_row(next), keys_.landmarks[band].v_row(next));
    }
    layer.rotate_keys(n, at, k_row(at));
  }
  halo_.start({keys_.k.data(), keys_.v.data(), plan().halo.begin});
  for (size_t band = 0; band < gathers_.size(); ++band)
    gathers_[band]->start(keys_.landmarks[band].k_row(0), keys_.landmarks[band].v_row(0));
}

void ShardKeys::wait_landmarks() {
  for (const auto& gather : gathers_)
    gather->wait();
}

std::vector<BandKeys<float>> ShardKeys::bands(TokenRange exact) const {
  const int64_t offset = (exact.begin - plan().halo.begin) * row_;
  return band_keys(pattern_,
                   {{}, keys_.k.data() + offset, keys_.v.data() + offset, exact.begin, exact.size()},
                   keys_.landmarks);
}

CommCost ShardKeys::landmark_cost() const {
  CommCost cost;
  for (const auto& gather : gathers_)
    cost += gather->cost();
  return cost;
}

}  // namespace longhalo

#include "model/device_training_pass.hpp"

#include <algorithm>

#include "core/clock.hpp"
#include "core/waiting.hpp"
#include "kernels/embedding/embedding.hpp"

namespace longhalo {
namespace {

template <class T>
void clear(DeviceBuffer<T>& values, cudaStream_t stream) {
  if (values.empty()) return;
  check_cuda(cudaMemsetAsync(values.data(), 0, static_cast<size_t>(values.bytes()), stream),
             "clearing gradients");
}

int64_t shard_size(const ShardPlan& shards, const DeviceRoom& room) {
  return shards.shard(room.transport.rank()).size();
}

}  // namespace

DeviceTrainingPass::DeviceTrainingPass(const DeviceRoom& room, const MpiSession& session,
                                       const DeviceWeights& weights, DeviceGradients& gradients,
                                       const AttentionPattern& pattern, const ShardPlan& shards,
                                       const DeviceTrainingOptions& options)
    : room_(room),
      weights_(weights),
      gradients_(gradients),
      pattern_(pattern),
      tile_(std::clamp<int64_t>(shard_size(shards, room), 1, options.tile)),
      kept_layers_(weights.config.layers, options.every),
      compute_(room.device.compute()),
      communication_(room.device.communication()),
      layer_(weights, tile_, room.matmul, compute_),
      back_(weights, gradients, tile_, room.matmul, compute_),
      keys_(room, weights.config, pattern, shards),
      halo_return_(room.transport, halo_return(keys_.plan()), keys_.row_elements(), compute_) {
  back_.set_deterministic(options.deterministic);
  const ModelConfig& c = weights.config;
  const int64_t n = shard().size();
  tokens_ = DeviceBuffer<int32_t>(n, "tokens", compute_);
  labels_ = DeviceBuffer<int32_t>(n, "labels", compute_);
  doc_start_ = DeviceBuffer<int64_t>(n, "documents", compute_);
  residual_ = DeviceBuffer<BFloat16>(n * c.hidden, "the residual stream of the shard", compute_);
  next_ = DeviceBuffer<BFloat16>(n * c.hidden, "the output of a layer", compute_);
  d_x_ = DeviceBuffer<BFloat16>(n * c.hidden, "gradients of the residual stream", compute_);
  d_normed_ = DeviceBuffer<BFloat16>(n * c.hidden, "gradients of normed activations", compute_);
  if (options.store != nullptr)
    stored_ = std::make_unique<DeviceStoredInputs>(session, *options.store, room.device,
                                                   device_stored_inputs_shape(kept_layers_, n, c.hidden));
  for (int64_t slot = 0; slot < kept_layers_.count() && stored_ == nullptr; ++slot)
    kept_.emplace_back(n * c.hidden, "the input of a layer", compute_);
  for (int64_t layer = 1; layer < kept_layers_.longest(); ++layer)
    inputs_.emplace_back(n * c.hidden, "the input of a layer", compute_);
  d_rows_ =
      DeviceBuffer<float>(keys_.rows() * keys_.row_elements(), "gradients of keys and values", compute_);
  d_kv_ = DeviceBuffer<BFloat16>(n * keys_.row_elements(), "gradients of keys and values", compute_);
  std::vector<PoolGradient> bands;
  float unused = 0;  // stands for wanted gradients while sizes are asked for
  for (int64_t band = 0; band < keys_.strided_bands(); ++band) {
    d_landmarks_.emplace_back(keys_.segments(band) * keys_.row_elements(), "gradients of landmarks",
                              compute_);
    landmark_returns_.push_back(std::make_unique<DeviceGradientReturn>(
        room.transport, landmark_return(shards, room.transport.rank(), keys_.stride(band)),
        keys_.row_elements(), compute_));
    PoolGradient& pool = bands.emplace_back();
    pool.stride = keys_.stride(band);
    pool.d_landmark_query = &unused;
  }
  workspace_ = DeviceBuffer<uint8_t>(
      std::max(rotate_and_pool_backward_workspace({c.kv_heads, c.head_dim, nullptr, bands}, n),
               embedding_backward_workspace(n, c.hidden)),
      "gradients of landmarks and of the embedding", compute_);
  sums_ = DeviceBuffer<DeviceLossSums>(1, "the loss", compute_);
}

LossSums DeviceTrainingPass::evaluate(const TrainingSequence& sequence) {
  upload(sequence);
  forward(WithGradient::kNo);
  return loss(sequence, 0, 0, WithGradient::kNo);
}

LossSums DeviceTrainingPass::forward_backward(const TrainingSequence& sequence, double loss_scale,
                                              double z_loss, const SectionHooks& hooks) {
  const ModelConfig& c = weights_.config;
  hooks_ = &hooks;
  const int64_t embedding = c.layers + 1;
  Stopwatch watch;
  const double waited = waited_seconds();
  upload(sequence);
  forward(WithGradient::kYes);
  wait_for_stream(compute_, "the forward pass on this rank's GPU");
  times_.own += std::max(0.0, watch.seconds() - (waited_seconds() - waited));
  times_.forward += watch.seconds();
  watch.restart();
  begin_section(0);
  begin_section(embedding);  // it may be the head too
  const LossSums sums = loss(sequence, loss_scale, z_loss, WithGradient::kYes);
  times_.own += watch.seconds();
  times_.loss += watch.seconds();
  watch.restart();
  end_section(0);
  for (int64_t slot = kept_layers_.count(); slot-- > 0;)
    backward_group(slot);
  embedding_backward(compute_, shard().size(), c.hidden, c.vocabulary, tokens_.data(), d_x_.data(),
                     gradients_.embedding(), workspace_.data());
  end_section(embedding);
  hooks_ = nullptr;
  wait_for_stream(compute_, "the backward pass on this rank's GPU");
  times_.backward += watch.seconds();
  room_.transport.check_health();
  return sums;
}

// The device is past all messages of a sequence when forward_backward() or evaluate() returns.
double DeviceTrainingPass::waited_seconds() {
  return keys_.halo_cost().exposed_seconds + keys_.landmark_cost().exposed_seconds +
         (stored_ != nullptr ? stored_->seconds() : 0);
}

TrainingTimes DeviceTrainingPass::times() {
  TrainingTimes times = times_;
  times.halo = keys_.halo_cost();
  times.landmarks = keys_.landmark_cost();
  times.returned = halo_return_.cost();
  for (const auto& landmarks : landmark_returns_)
    times.returned += landmarks->cost();
  if (stored_ != nullptr) times.store = stored_->seconds();
  return times;
}

void DeviceTrainingPass::begin_section(int64_t section) {
  if (hooks_->begin) hooks_->begin(section);
}

void DeviceTrainingPass::end_section(int64_t section) {
  if (hooks_->done) hooks_->done(section);
}

void DeviceTrainingPass::for_tiles(TokenRange range,
                                   const std::function<void(int64_t at, int64_t n)>& work) const {
  for (int64_t at = range.begin; at < range.end; at += tile_)
    work(at, std::min(tile_, range.end - at));
}

// The host's arrays may go when this returns: they are not page-locked, so that the copies wait.
void DeviceTrainingPass::upload(const TrainingSequence& sequence) {
  const TokenRange own = shard();
  if (own.empty()) return;
  const auto inside = [&](std::span<const int32_t> all, bool ignored) {
    const auto part = all.subspan(static_cast<size_t>(own.begin), static_cast<size_t>(own.size()));
    return std::all_of(part.begin(), part.end(), [&](int32_t token) {
      return (token >= 0 && token < weights_.config.vocabulary) || (ignored && token == kIgnoredLabel);
    });
  };
  check(inside(sequence.tokens, false) && inside(sequence.labels, true),
        "tokens and labels lie in the vocabulary, or labels are ignored");
  const Waiting waiting("this rank's GPU, for what it had to do before");
  copy_async(tokens_.data(), sequence.tokens.data() + own.begin, own.size(), compute_);
  copy_async(labels_.data(), sequence.labels.data() + own.begin, own.size(), compute_);
  copy_async(doc_start_.data(), sequence.doc_start.data() + own.begin, own.size(), compute_);
  wait_for_stream(compute_, "a sequence's way to this rank's GPU");
}

void DeviceTrainingPass::forward(WithGradient with_gradient) {
  const ModelConfig& c = weights_.config;
  if (!shard().empty()) layer_.embed(shard().size(), tokens_.data(), residual_.data());
  for (int64_t index = 0; index < c.layers; ++index) {
    const bool keeps = with_gradient == WithGradient::kYes && kept_layers_.keeps(index);
    if (keeps && stored_ == nullptr && !shard().empty())
      copy_async(kept_[static_cast<size_t>(kept_layers_.slot(index))].data(), residual_.data(),
                 residual_.size(), compute_);
    if (stored_ != nullptr && keeps) stored_->mark();
    run_layer(index, residual_.data(), next_.data());
    if (stored_ != nullptr && keeps) stored_->put(index, residual_);
    std::swap(residual_, next_);
    room_.transport.check_health();
  }
  if (with_gradient == WithGradient::kYes && stored_ != nullptr) stored_->turn();
}

// Queueing a layer is no wait, until the GPU's queue is full of work that waits for another rank.
void DeviceTrainingPass::run_layer(int64_t index, const BFloat16* x, BFloat16* x_out) {
  at_layer(index);
  const Waiting waiting("this rank's GPU, for room to queue a layer");
  const ModelConfig& c = weights_.config;
  if (!shard().empty()) copy_async(x_out, x, shard().size() * c.hidden, compute_);
  const auto attend = [&](TokenRange queries) {
    if (queries.empty()) return;
    const std::vector<BandKeys<BFloat16>> bands = keys_.bands(keys_.visible(queries));
    for_tiles(queries, [&](int64_t at, int64_t n) {
      layer_.project_queries(index, n, x + row(at), at);
      layer_.attend(index, n, bands, x_out + row(at), doc_start_.data() + (at - shard().begin));
    });
  };
  keys_.start(layer_, index, x);
  keys_.wait_landmarks();
  attend(keys_.interior());
  keys_.wait_halo();
  attend(keys_.boundary());
}

// The layers whose inputs hang on one that was kept.
void DeviceTrainingPass::backward_group(int64_t slot) {
  const int64_t first = kept_layers_.all()[static_cast<size_t>(slot)], end = kept_layers_.end(slot);
  const BFloat16* const kept =
      stored_ != nullptr ? stored_->take(first) : kept_[static_cast<size_t>(slot)].data();
  const auto input = [&](int64_t index) {
    return index == first ? kept : inputs_[static_cast<size_t>(index - first - 1)].data();
  };
  for (int64_t index = first; index + 1 < end; ++index)
    run_layer(index, input(index), inputs_[static_cast<size_t>(index - first)].data());
  for (int64_t index = end; index-- > first;) {
    begin_section(section_of_layer(weights_.config, index));
    backward_layer(index, input(index));
    end_section(section_of_layer(weights_.config, index));
    room_.transport.check_health();
  }
}

void DeviceTrainingPass::backward_layer(int64_t index, const BFloat16* x) {
  at_layer(index);
  const Waiting waiting("this rank's GPU, for room to queue a layer");
  keys_.start(layer_, index, x);
  clear(d_rows_, compute_);
  for (DeviceBuffer<float>& d : d_landmarks_)
    clear(d, compute_);
  // The halo arrives during the first half of the interior, its gradients leave during the second.
  const TokenRange interior = keys_.interior();
  const int64_t tiles = (interior.size() + tile_ - 1) / tile_;
  const int64_t middle = std::min(interior.begin + tiles / 2 * tile_, interior.end);
  keys_.wait_landmarks();
  attend_back(index, {interior.begin, middle}, x);
  keys_.wait_halo();
  attend_back(index, keys_.boundary(), x);
  halo_return_.start(d_rows_.data(), keys_.plan().halo.begin, compute_, communication_);
  attend_back(index, {middle, interior.end}, x);
  for (size_t band = 0; band < d_landmarks_.size(); ++band)
    landmark_returns_[band]->start(d_landmarks_[band].data(), 0, compute_, communication_);
  halo_return_.add(d_rows_.data(), keys_.plan().halo.begin, compute_);
  for (size_t band = 0; band < d_landmarks_.size(); ++band)
    landmark_returns_[band]->add(d_landmarks_[band].data(), 0, compute_);
  pool_back(index, x);
}

void DeviceTrainingPass::attend_back(int64_t index, TokenRange queries, const BFloat16* x) {
  if (queries.empty()) return;
  const TokenRange visible = keys_.visible(queries);
  const std::vector<BandKeys<BFloat16>> bands = keys_.bands(visible);
  const int64_t elements = keys_.row_elements(), reach = pattern_.exact_reach();
  for_tiles(queries, [&](int64_t at, int64_t n) {
    const int64_t oldest = reach > at ? visible.begin : std::max(visible.begin, at - reach + 1);
    const TokenRange seen{std::min(oldest, at + n), at + n};
    const std::vector<BandKeys<BFloat16>> seen_bands = keys_.bands(seen);
    std::vector<BandGradient<BFloat16>> gradients;
    size_t strided = 0;
    for (const Band& band : pattern_.bands) {
      float* const dk = band.stride == 1 ? d_rows_.data() + (seen.begin - keys_.plan().halo.begin) * elements
                                         : d_landmarks_[strided++].data();
      gradients.push_back({dk, dk + elements / 2, elements});
    }
    back_.attend({index, n, at, doc_start_.data() + (at - shard().begin), bands, seen_bands, x + row(at)},
                 gradients, d_x_.data() + row(at), d_normed_.data() + row(at));
  });
}

// From whole gradients of keys, values and landmarks to those of the layer's input.
void DeviceTrainingPass::pool_back(int64_t index, const BFloat16* x) {
  const TokenRange own = shard();
  if (own.empty()) return;
  const ModelConfig& c = weights_.config;
  const DeviceLayerWeights& w = weights_.layers[static_cast<size_t>(index)];
  const DeviceLayerGradients& g = gradients_.layer(index);
  const int64_t elements = keys_.row_elements();
  std::vector<PoolGradient> bands;
  for (int64_t band = 0; band < keys_.strided_bands(); ++band) {
    const auto at = static_cast<size_t>(band);
    const int64_t first = keys_.own_segments(band).begin;
    bands.push_back({keys_.stride(band), w.landmark_query.empty() ? nullptr : w.landmark_query[at].data(),
                     keys_.landmarks(band) + first * elements, keys_.lse(band) + first * c.kv_heads,
                     d_landmarks_[at].data() + first * elements,
                     g.landmark_query.empty() ? nullptr : g.landmark_query[at]});
  }
  rotate_and_pool_backward(compute_, {c.kv_heads, c.head_dim, back_.frequencies(), bands}, own.size(),
                           own.begin, keys_.row(own.begin),
                           d_rows_.data() + (own.begin - keys_.plan().halo.begin) * elements, d_kv_.data(),
                           workspace_.data());
  for_tiles(own, [&](int64_t at, int64_t n) {
    back_.keys(index, n, x + row(at), d_kv_.data() + (at - own.begin) * elements, d_normed_.data() + row(at),
               d_x_.data() + row(at));
  });
}

}  // namespace longhalo

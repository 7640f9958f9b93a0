#include "model/training_pass.hpp"

#include <algorithm>

#include "core/clock.hpp"
#include "core/waiting.hpp"
#include "kernels/embedding/embedding.hpp"
#include "model/parameters.hpp"

namespace longhalo {
namespace {

void clear(HostBuffer<float>& values) {
  std::fill(values.data(), values.data() + values.size(), 0.0F);
}

int64_t elements_of_layer(const LayerWeights& w) {
  int64_t elements = w.landmark_bias.size();
  for (const HostBuffer<float>* one :
       {&w.attention_norm, &w.q, &w.k, &w.v, &w.o, &w.mlp_norm, &w.gate_up, &w.down})
    elements += one->size();
  for (const HostBuffer<float>& query : w.landmark_query)
    elements += query.size();
  return elements;
}

}  // namespace

LossSums LossSums::over_ranks(const MpiSession& session) const {
  const double own[3] = {cross_entropy, z, static_cast<double>(tokens)};
  std::vector<double> all(static_cast<size_t>(3 * session.ranks()));
  const Waiting waiting("the loss of all ranks");
  check_mpi(MPI_Allgather(own, 3, MPI_DOUBLE, all.data(), 3, MPI_DOUBLE, session.comm()), "MPI_Allgather");
  LossSums sums;
  for (size_t at = 0; at < all.size(); at += 3)
    sums += {all[at], all[at + 1], static_cast<int64_t>(all[at + 2])};
  return sums;
}

TrainingPass::TrainingPass(const MpiSession& session, const Weights& weights, Weights& gradients,
                           const AttentionPattern& pattern, const ShardPlan& shards, int64_t tile,
                           const Checkpointing& checkpointing)
    : session_(session),
      weights_(weights),
      gradients_(gradients),
      pattern_(pattern),
      strides_(pattern.strides()),
      tile_(std::clamp<int64_t>(shards.shard(session.rank()).size(), 1, tile)),
      layer_(weights, tile_),
      back_(weights, gradients, tile_),
      keys_(session, weights.config, pattern, shards),
      residual_(shard().size() * weights.config.hidden, "the residual stream of the shard"),
      d_x_(residual_.size(), "gradients of the residual stream of the shard"),
      d_normed_(residual_.size(), "gradients of the normed activations of the shard"),
      dk_(keys_.rows() * keys_.row_elements(), "gradients of the keys of a layer"),
      dv_(keys_.rows() * keys_.row_elements(), "gradients of the values of a layer"),
      stored_layers_(weights.config.layers, checkpointing.every),
      halo_return_(session, halo_return(keys_.plan()), keys_.row_elements()) {
  const int64_t layers = weights.config.layers;
  if (checkpointing.store != nullptr) {
    stored_ = std::make_unique<StoredInputs>(session, *checkpointing.store, stored_layers_);
    for (int64_t layer = 0; layer < stored_layers_.longest(); ++layer)
      inputs_.emplace_back(residual_.size(), "the input of a layer");
  } else {
    for (int64_t layer = 0; layer < layers; ++layer)
      kept_.push_back({HostBuffer<float>(residual_.size(), "the input of a layer"), keys_.make_layer(),
                       LayerActivations(weights.config, shard().size())});
  }
  for (size_t band = 0; band < strides_.size(); ++band) {
    const int64_t elements = keys_.segments(static_cast<int64_t>(band)) * keys_.row_elements();
    d_landmarks_.push_back({HostBuffer<float>(elements, "gradients of landmarks"),
                            HostBuffer<float>(elements, "gradients of landmarks")});
    landmark_returns_.push_back(std::make_unique<GradientReturn>(
        session, landmark_return(shards, session.rank(), strides_[band]), keys_.row_elements()));
  }
}

LossSums TrainingPass::evaluate(const TrainingSequence& sequence) {
  forward(sequence, WithGradient::kNo);
  return loss(sequence, 0, 0, WithGradient::kNo);
}

LossSums TrainingPass::forward_backward(const TrainingSequence& sequence, double loss_scale, double z_loss,
                                        const GradientsReady& ready) {
  Stopwatch watch;
  const double waited = waited_seconds();
  if (stored_) {
    forward(sequence, WithGradient::kYes);
    stored_->turn();
  } else {
    forward_keeping(sequence);
  }
  times_.own += std::max(0.0, watch.seconds() - (waited_seconds() - waited));
  times_.forward += watch.seconds();
  watch.restart();
  const LossSums sums = loss(sequence, loss_scale, z_loss, WithGradient::kYes);
  times_.own += watch.seconds();
  times_.loss += watch.seconds();
  watch.restart();
  ready_ = &ready;
  done_ = weights_.untied_head.size() + weights_.final_norm.size();
  if (ready.ready) ready.ready(done_);
  if (stored_) {
    for (int64_t slot = stored_layers_.count(); slot-- > 0;)
      backward_group(slot, sequence);
  } else {
    for (int64_t index = weights_.config.layers; index-- > 0;) {
      KeptLayer& kept = kept_[static_cast<size_t>(index)];
      backward_layer(index, sequence, kept.x.data(), &kept);
    }
  }
  embedding_backward(shard().size(), weights_.config.hidden, sequence.tokens.data() + shard().begin,
                     d_x_.data(), gradients_.embedding.data());
  done_ += gradients_.embedding.size();
  if (ready.ready) ready.ready(done_);
  ready_ = nullptr;
  times_.backward += watch.seconds();
  return sums;
}

void TrainingPass::for_tiles(TokenRange range, const std::function<void(int64_t, int64_t)>& work) const {
  for (int64_t at = range.begin; at < range.end; at += tile_)
    work(at, std::min(tile_, range.end - at));
}

void TrainingPass::for_layer_tiles(int64_t index, TokenRange queries, const TrainingSequence& sequence,
                                   const float* x, const TileWork& work) {
  const std::vector<BandKeys<float>> bands = keys_.bands(keys_.visible(queries));
  for_tiles(queries, [&](int64_t at, int64_t n) {
    work({index, n, at, sequence.doc_start.data() + at, bands, x + row(at)}, at - shard().begin);
    poll();
  });
}

void TrainingPass::poll() {
  keys_.poll();
  halo_return_.poll();
  if (ready_ != nullptr && ready_->poll) ready_->poll();
}

void TrainingPass::embed(const TrainingSequence& sequence, HostBuffer<float>& x) const {
  const auto own = static_cast<size_t>(shard().begin);
  embed_tokens(weights_, std::span(sequence.tokens).subspan(own, static_cast<size_t>(shard().size())),
               x.data());
}

void TrainingPass::forward(const TrainingSequence& sequence, WithGradient with_gradient) {
  embed(sequence, residual_);
  for (int64_t index = 0; index < weights_.config.layers; ++index) {
    if (with_gradient == WithGradient::kYes) stored_->before_layer(index, residual_.span());
    // From one array to the other, since the store may still be reading the first.
    run_layer(index, sequence, residual_.data(), d_normed_.data());
    std::swap(residual_, d_normed_);
  }
}

void TrainingPass::run_layer(int64_t index, const TrainingSequence& sequence, const float* x, float* x_out) {
  at_layer(index);
  const auto attend = [&](TokenRange queries) {
    for_layer_tiles(index, queries, sequence, x, [&](const LayerBackward::Tile& tile, int64_t first) {
      float* out = x_out + first * weights_.config.hidden;
      std::copy_n(tile.x, tile.n * weights_.config.hidden, out);
      layer_.attend(index, tile.n, tile.first_position, tile.bands, out, tile.doc_start);
    });
  };
  keys_.start(layer_, index, x);
  keys_.wait_landmarks();
  attend(keys_.interior());
  keys_.wait_halo();
  attend(keys_.boundary());
}

void TrainingPass::forward_keeping(const TrainingSequence& sequence) {
  embed(sequence, kept_[0].x);
  for (int64_t index = 0; index < weights_.config.layers; ++index) {
    at_layer(index);
    const auto at = static_cast<size_t>(index);
    KeptLayer& kept = kept_[at];
    float* x_out = at + 1 < kept_.size() ? kept_[at + 1].x.data() : residual_.data();
    const auto attend = [&](TokenRange queries) {
      for_layer_tiles(index, queries, sequence, kept.x.data(),
                      [&](const LayerBackward::Tile& tile, int64_t first) {
                        back_.forward(tile, kept.values.at(first), x_out + first * weights_.config.hidden);
                      });
    };
    keys_.swap(kept.keys);
    keys_.start(layer_, index, kept.x.data());
    keys_.wait_landmarks();
    attend(keys_.interior());
    keys_.wait_halo();
    attend(keys_.boundary());
    keys_.swap(kept.keys);
  }
}

// The layers from `first` on whose inputs hang on the one that was stored.
void TrainingPass::backward_group(int64_t slot, const TrainingSequence& sequence) {
  const int64_t first = stored_layers_.all()[static_cast<size_t>(slot)], end = stored_layers_.end(slot);
  const auto input = [&](int64_t index) -> HostBuffer<float>& {
    return inputs_[static_cast<size_t>(index - first)];
  };
  stored_->take(first, input(first).span());
  const Stopwatch watch;
  for (int64_t index = first; index + 1 < end; ++index)
    run_layer(index, sequence, input(index).data(), input(index + 1).data());
  times_.recompute += watch.seconds();
  for (int64_t index = end; index-- > first;)
    backward_layer(index, sequence, input(index).data(), nullptr);
}

void TrainingPass::backward_layer(int64_t index, const TrainingSequence& sequence, const float* x,
                                  KeptLayer* kept) {
  at_layer(index);
  if (kept != nullptr) {
    keys_.swap(kept->keys);
  } else {
    keys_.start(layer_, index, x);
  }
  clear(dk_);
  clear(dv_);
  for (LandmarkGradient& d : d_landmarks_) {
    clear(d.dk);
    clear(d.dv);
  }
  // The halo arrives during the first half of the interior, its gradients leave during the second.
  const TokenRange interior = keys_.interior();
  const int64_t tiles = (interior.size() + tile_ - 1) / tile_;
  const int64_t middle = std::min(interior.begin + tiles / 2 * tile_, interior.end);
  if (kept == nullptr) keys_.wait_landmarks();
  attend_back(index, {interior.begin, middle}, sequence, x, kept);
  if (kept == nullptr) keys_.wait_halo();
  attend_back(index, keys_.boundary(), sequence, x, kept);
  const KvRows exact{dk_.data(), dv_.data(), keys_.plan().halo.begin};
  halo_return_.start(exact);
  attend_back(index, {middle, interior.end}, sequence, x, kept);

  for (size_t band = 0; band < strides_.size(); ++band)
    landmark_returns_[band]->start({d_landmarks_[band].dk.data(), d_landmarks_[band].dv.data(), 0});
  halo_return_.add(exact);
  for (size_t band = 0; band < strides_.size(); ++band)
    landmark_returns_[band]->add({d_landmarks_[band].dk.data(), d_landmarks_[band].dv.data(), 0});
  pool_back(index, x);
  if (kept != nullptr) keys_.swap(kept->keys);
  layer_done(index);
}

void TrainingPass::layer_done(int64_t index) {
  done_ += elements_of_layer(weights_.layers[static_cast<size_t>(index)]);
  if (ready_->ready) ready_->ready(done_);
}

void TrainingPass::attend_back(int64_t index, TokenRange queries, const TrainingSequence& sequence,
                               const float* x, KeptLayer* kept) {
  const int64_t offset = (keys_.visible(queries).begin - keys_.plan().halo.begin) * keys_.row_elements();
  std::vector<BandGradient<float>> gradients;
  size_t strided = 0;
  for (const Band& band : pattern_.bands) {
    if (band.stride == 1) {
      gradients.push_back({dk_.data() + offset, dv_.data() + offset});
    } else {
      gradients.push_back({d_landmarks_[strided].dk.data(), d_landmarks_[strided].dv.data()});
      ++strided;
    }
  }
  for_layer_tiles(index, queries, sequence, x, [&](const LayerBackward::Tile& tile, int64_t first) {
    float* d_x = d_x_.data() + first * weights_.config.hidden;
    float* d_normed = d_normed_.data() + first * weights_.config.hidden;
    if (kept != nullptr) {
      back_.attend(tile, kept->values.at(first), gradients, d_x, d_normed);
    } else {
      back_.attend(tile, gradients, d_x, d_normed);
    }
  });
}

// From whole gradients of keys, values and landmarks to those of the layer's input. The keys of this layer
// are not wanted any more: they are turned back to what pooling saw.
void TrainingPass::pool_back(int64_t index, const float* x) {
  const ModelConfig& c = weights_.config;
  const TokenRange own = shard();
  if (own.empty()) return;
  const int64_t elements = keys_.row_elements(), offset = (own.begin - keys_.plan().halo.begin) * elements;
  back_.rotate_back(own.size(), static_cast<double>(own.begin), 1, keys_.k_row(own.begin));
  back_.rotate_back(own.size(), static_cast<double>(own.begin), 1, dk_.data() + offset);
  const LayerWeights& w = weights_.layers[static_cast<size_t>(index)];
  LayerWeights& g = gradients_.layers[static_cast<size_t>(index)];
  for (size_t band = 0; band < strides_.size(); ++band) {
    const TokenRange segments = keys_.own_segments(static_cast<int64_t>(band));
    if (segments.empty()) continue;
    const int64_t stride = strides_[band];
    float* d_kbar = d_landmarks_[band].dk.data() + segments.begin * elements;
    const float* d_vbar = d_landmarks_[band].dv.data() + segments.begin * elements;
    const double centre = static_cast<double>(segments.begin * stride) + static_cast<double>(stride - 1) / 2;
    back_.rotate_back(segments.size(), centre, static_cast<double>(stride), d_kbar);
    const float* u = w.landmark_query.empty() ? nullptr : w.landmark_query[band].data();
    float* d_u = g.landmark_query.empty() ? nullptr : g.landmark_query[band].data();
    const int64_t first = (segments.begin * stride - keys_.plan().halo.begin) * elements;
    landmark_pool_backward({c.kv_heads, c.head_dim, stride, u}, segments.size() * stride,
                           keys_.k_row(segments.begin * stride), keys_.v_row(segments.begin * stride), d_kbar,
                           d_vbar, dk_.data() + first, dv_.data() + first, d_u);
  }
  for_tiles(own, [&](int64_t at, int64_t n) {
    const int64_t key = (at - keys_.plan().halo.begin) * elements;
    back_.keys(index, n, x + row(at), dk_.data() + key, dv_.data() + key, d_normed_.data() + row(at),
               d_x_.data() + row(at));
  });
}

double TrainingPass::waited_seconds() const {
  return keys_.halo_cost().exposed_seconds + keys_.landmark_cost().exposed_seconds +
         (stored_ ? stored_->seconds() : 0);
}

const TrainingTimes& TrainingPass::times() {
  times_.halo = keys_.halo_cost();
  times_.landmarks = keys_.landmark_cost();
  if (stored_) times_.store = stored_->seconds();
  times_.returned = halo_return_.cost();
  for (const auto& landmarks : landmark_returns_)
    times_.returned += landmarks->cost();
  return times_;
}

}  // namespace longhalo

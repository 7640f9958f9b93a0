#include "model/training_pass.hpp"

#include <algorithm>

#include "core/clock.hpp"
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
  check_mpi(MPI_Allgather(own, 3, MPI_DOUBLE, all.data(), 3, MPI_DOUBLE, session.comm()), "MPI_Allgather");
  LossSums sums;
  for (size_t at = 0; at < all.size(); at += 3)
    sums += {all[at], all[at + 1], static_cast<int64_t>(all[at + 2])};
  return sums;
}

TrainingPass::TrainingPass(const MpiSession& session, const Weights& weights, Weights& gradients,
                           const AttentionPattern& pattern, const ShardPlan& shards, int64_t tile)
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
      halo_return_(session, halo_return(keys_.plan()), keys_.row_elements()) {
  for (int64_t layer = 0; layer < weights.config.layers; ++layer)
    inputs_.emplace_back(residual_.size(), "the input of a layer");
  for (size_t band = 0; band < strides_.size(); ++band) {
    const int64_t elements = keys_.segments(static_cast<int64_t>(band)) * keys_.row_elements();
    d_landmarks_.push_back({HostBuffer<float>(elements, "gradients of landmarks"),
                            HostBuffer<float>(elements, "gradients of landmarks")});
    landmark_returns_.push_back(std::make_unique<GradientReturn>(
        session, landmark_return(shards, session.rank(), strides_[band]), keys_.row_elements()));
  }
}

LossSums TrainingPass::evaluate(const TrainingSequence& sequence) {
  forward(sequence, KeepInputs::kNo);
  return loss(sequence, 0, 0, WithGradient::kNo);
}

LossSums TrainingPass::forward_backward(const TrainingSequence& sequence, double loss_scale, double z_loss,
                                        const GradientsReady& ready) {
  Stopwatch watch;
  forward(sequence, KeepInputs::kYes);
  times_.forward += watch.seconds();
  watch.restart();
  const LossSums sums = loss(sequence, loss_scale, z_loss, WithGradient::kYes);
  times_.loss += watch.seconds();
  watch.restart();
  int64_t done = weights_.untied_head.size() + weights_.final_norm.size();
  if (ready) ready(done);
  for (int64_t index = weights_.config.layers; index-- > 0;) {
    backward_layer(index, sequence);
    done += elements_of_layer(weights_.layers[static_cast<size_t>(index)]);
    if (ready) ready(done);
  }
  embedding_backward(shard().size(), weights_.config.hidden, sequence.tokens.data() + shard().begin,
                     d_x_.data(), gradients_.embedding.data());
  done += gradients_.embedding.size();
  if (ready) ready(done);
  times_.backward += watch.seconds();
  return sums;
}

void TrainingPass::for_tiles(TokenRange range, const std::function<void(int64_t, int64_t)>& work) const {
  for (int64_t at = range.begin; at < range.end; at += tile_)
    work(at, std::min(tile_, range.end - at));
}

void TrainingPass::forward(const TrainingSequence& sequence, KeepInputs keep) {
  const auto own = static_cast<size_t>(shard().begin);
  embed_tokens(weights_, std::span(sequence.tokens).subspan(own, static_cast<size_t>(shard().size())),
               residual_.data());
  const auto attend = [&](int64_t index, TokenRange queries) {
    const std::vector<BandKeys<float>> bands = keys_.bands(keys_.visible(queries));
    for_tiles(queries, [&](int64_t at, int64_t n) {
      layer_.attend(index, n, at, bands, residual_.data() + row(at), sequence.doc_start.data() + at);
      keys_.poll();
    });
  };
  for (int64_t index = 0; index < weights_.config.layers; ++index) {
    if (keep == KeepInputs::kYes)
      std::copy_n(residual_.data(), residual_.size(), inputs_[static_cast<size_t>(index)].data());
    keys_.start(layer_, index, residual_.data());
    keys_.wait_landmarks();
    attend(index, keys_.interior());
    keys_.wait_halo();
    attend(index, keys_.boundary());
  }
}

void TrainingPass::backward_layer(int64_t index, const TrainingSequence& sequence) {
  const float* x = inputs_[static_cast<size_t>(index)].data();
  keys_.start(layer_, index, x);
  clear(dk_);
  clear(dv_);
  for (LandmarkGradient& d : d_landmarks_) {
    clear(d.dk);
    clear(d.dv);
  }
  keys_.wait_landmarks();
  attend_back(index, keys_.interior(), sequence, x);
  keys_.wait_halo();
  attend_back(index, keys_.boundary(), sequence, x);

  const KvRows exact{dk_.data(), dv_.data(), keys_.plan().halo.begin};
  halo_return_.start(exact);
  for (size_t band = 0; band < strides_.size(); ++band)
    landmark_returns_[band]->start({d_landmarks_[band].dk.data(), d_landmarks_[band].dv.data(), 0});
  halo_return_.add(exact);
  for (size_t band = 0; band < strides_.size(); ++band)
    landmark_returns_[band]->add({d_landmarks_[band].dk.data(), d_landmarks_[band].dv.data(), 0});
  pool_back(index, x);
}

void TrainingPass::attend_back(int64_t index, TokenRange queries, const TrainingSequence& sequence,
                               const float* x) {
  const TokenRange exact = keys_.visible(queries);
  const std::vector<BandKeys<float>> bands = keys_.bands(exact);
  const int64_t offset = (exact.begin - keys_.plan().halo.begin) * keys_.row_elements();
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
  for_tiles(queries, [&](int64_t at, int64_t n) {
    back_.attend(index, n, at, sequence.doc_start.data() + at, bands, gradients, x + row(at),
                 d_x_.data() + row(at), d_normed_.data() + row(at));
    keys_.poll();
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

const TrainingTimes& TrainingPass::times() {
  times_.halo = keys_.cost();
  times_.returned = halo_return_.cost();
  for (const auto& landmarks : landmark_returns_)
    times_.returned += landmarks->cost();
  return times_;
}

}  // namespace longhalo

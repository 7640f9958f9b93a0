// The end of a training pass's forward and the start of its backward: final norm, logits and cross-entropy,
// forward and back, a tile of rows at a time.
#include <algorithm>

#include "kernels/cross_entropy/cross_entropy.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "model/training_pass.hpp"

namespace longhalo {

LossSums TrainingPass::loss(const TrainingSequence& sequence, double loss_scale, double z_loss,
                            WithGradient with_gradient) {
  const ModelConfig& c = weights_.config;
  const auto epsilon = static_cast<float>(c.rms_norm_epsilon);
  const bool back = with_gradient == WithGradient::kYes;
  HostBuffer<float> hidden(tile_ * c.hidden, "hidden states of a tile");
  HostBuffer<float> d_hidden(back ? tile_ * c.hidden : 0, "gradients of hidden states of a tile");
  if (back) std::fill(d_x_.data(), d_x_.data() + d_x_.size(), 0.0F);

  CrossEntropy<float> problem;
  problem.hidden = c.hidden;
  problem.vocabulary = c.vocabulary;
  problem.x = hidden.data();
  problem.head = weights_.head();
  problem.z_loss = static_cast<float>(z_loss);
  problem.scale = static_cast<float>(loss_scale);
  if (back) {
    problem.d_x = d_hidden.data();
    problem.d_head = c.tied_embeddings ? gradients_.embedding.data() : gradients_.untied_head.data();
  }
  LossSums sums;
  for_tiles(shard(), [&](int64_t at, int64_t n) {
    const float* x = residual_.data() + row(at);
    rmsnorm(n, c.hidden, x, weights_.final_norm.data(), epsilon, hidden.data());
    std::fill(d_hidden.data(), d_hidden.data() + d_hidden.size(), 0.0F);
    problem.n = n;
    problem.labels = sequence.labels.data() + at;
    const CrossEntropySums tile = cross_entropy(problem);
    sums += {tile.loss, tile.z_loss, tile.count};
    if (back)
      rmsnorm_backward(n, c.hidden, x, weights_.final_norm.data(), epsilon, d_hidden.data(),
                       d_x_.data() + row(at), gradients_.final_norm.data());
  });
  return sums;
}

}  // namespace longhalo

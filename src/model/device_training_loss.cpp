// The end of a training pass's forward and the start of its backward on the GPU: final norm, logits and
// cross-entropy, forward and back, some rows at a time, so that [n, V] never exists.
#include <algorithm>

#include "core/waiting.hpp"
#include "kernels/cross_entropy/cross_entropy.hpp"
#include "model/device_training_memory.hpp"
#include "model/device_training_pass.hpp"

namespace longhalo {

LossSums DeviceTrainingPass::loss(const TrainingSequence& sequence, double loss_scale, double z_loss,
                                  WithGradient with_gradient) {
  const Waiting waiting("this rank's GPU, for the loss");
  const ModelConfig& c = weights_.config;
  const bool back = with_gradient == WithGradient::kYes;
  const int64_t rows = device_loss_rows(c, tile_);
  const int64_t stride = (c.vocabulary + 7) / 8 * 8;
  DeviceBuffer<float> logits(rows * c.vocabulary, "logits of some tokens", compute_);
  DeviceBuffer<BFloat16> d_logits(back ? rows * stride : 0, "gradients of logits", compute_);
  DeviceBuffer<BFloat16> hidden(rows * c.hidden, "hidden states of some tokens", compute_);
  DeviceBuffer<BFloat16> d_hidden(back ? rows * c.hidden : 0, "gradients of hidden states", compute_);
  DeviceBuffer<uint8_t> losses(8 * rows, "losses of some tokens", compute_);
  check_cuda(cudaMemsetAsync(sums_.data(), 0, sizeof(DeviceLossSums), compute_), "clearing the loss");
  if (back && !d_x_.empty())
    check_cuda(cudaMemsetAsync(d_x_.data(), 0, static_cast<size_t>(d_x_.bytes()), compute_),
               "clearing gradients");
  for (int64_t at = shard().begin; at < shard().end; at += rows) {
    const int64_t n = std::min(rows, shard().end - at);
    const BFloat16* x = residual_.data() + row(at);
    layer_.final_norm(n, x, hidden.data());
    room_.matmul.run(n, c.vocabulary, c.hidden, hidden.data(), weights_.head(), logits.data());
    cross_entropy_rows(compute_, n, c.vocabulary, logits.data(), labels_.data() + (at - shard().begin),
                       static_cast<float>(z_loss), static_cast<float>(loss_scale),
                       back ? d_logits.data() : nullptr, stride, sums_.data(), losses.data());
    if (!back) continue;
    room_.matmul.input_gradient(n, c.vocabulary, c.hidden, d_logits.data(), weights_.head(), d_hidden.data(),
                                Accumulate::kOverwrite, stride);
    room_.matmul.weight_gradient(n, c.vocabulary, c.hidden, d_logits.data(), hidden.data(), gradients_.head(),
                                 Accumulate::kAdd, stride);
    back_.norm_backward(n, x, weights_.final_norm, d_hidden.data(), d_x_.data() + row(at),
                        gradients_.final_norm());
  }
  DeviceLossSums sums{};
  to_host<DeviceLossSums>({&sums, 1}, sums_.data(), compute_);
  room_.transport.check_health();
  const auto own =
      sequence.labels.subspan(static_cast<size_t>(shard().begin), static_cast<size_t>(shard().size()));
  return {sums.loss, sums.z_loss,
          static_cast<int64_t>(own.size()) - std::count(own.begin(), own.end(), kIgnoredLabel)};
}

}  // namespace longhalo

#include "model/device_layer_backward.hpp"

#include "device/nvtx.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/rotary/rotary.hpp"
#include "kernels/swiglu/swiglu.hpp"

namespace longhalo {
namespace {

float epsilon_of(const ModelConfig& c) {
  return static_cast<float>(c.rms_norm_epsilon);
}

}  // namespace

DeviceLayerBackward::DeviceLayerBackward(const DeviceWeights& weights, DeviceGradients& gradients,
                                         int64_t tile, DeviceMatmul& matmul, cudaStream_t stream)
    : weights_(weights), gradients_(gradients), tile_(tile), matmul_(matmul), stream_(stream) {
  check(tile >= 1, "a tile has at least one token");
  check(weights.precision == Precision::kBf16, "weights that learn are in bf16");
  const ModelConfig& c = weights.config;
  frequencies_ = to_device<double>(
      rotary_frequencies(c.head_dim, c.rope_theta, c.rope_scaling ? &*c.rope_scaling : nullptr),
      "rotary frequencies", stream);
  const auto array = [&](int64_t width, const char* purpose) {
    return DeviceBuffer<BFloat16>(tile * width, purpose, stream);
  };
  normed_ = array(c.hidden, "normed activations of a tile");
  mlp_normed_ = array(c.hidden, "normed activations of a tile");
  x_mid_ = array(c.hidden, "activations between attention and MLP of a tile");
  q_ = array(c.q_size(), "queries of a tile");
  attended_ = array(c.q_size(), "attention output of a tile");
  lse_ = DeviceBuffer<float>(c.heads * tile, "softmax normalisers of a tile", stream);
  gate_up_ = array(2 * c.ffn, "gate and up of a tile");
  activated_ = array(c.ffn, "MLP activations of a tile");
  d_activated_ = array(c.ffn, "gradients of MLP activations of a tile");
  d_mlp_normed_ = array(c.hidden, "gradients of normed activations of a tile");
  d_attended_ = array(c.q_size(), "gradients of the attention output of a tile");
  d_q_ = array(c.q_size(), "gradients of queries of a tile");
  norm_workspace_ =
      DeviceBuffer<uint8_t>(rmsnorm_backward_workspace(tile, c.hidden), "a norm's gradient", stream);
}

int64_t DeviceLayerBackward::bytes(const ModelConfig& c, int64_t tile) {
  return tile * (2 * (4 * c.hidden + 4 * c.q_size() + 4 * c.ffn) + 4 * c.heads) +
         rmsnorm_backward_workspace(tile, c.hidden);
}

Attention<BFloat16> DeviceLayerBackward::attention_of(const Tile& tile) {
  const ModelConfig& c = weights_.config;
  Attention<BFloat16> attention;
  attention.heads = c.heads;
  attention.kv_heads = c.kv_heads;
  attention.head_dim = c.head_dim;
  attention.scale = kExponentScale;
  attention.queries = tile.n;
  attention.first_query = tile.first_position;
  attention.q = q_.data();
  attention.bands = tile.bands;
  attention.landmark_bias = layer(tile.layer).landmark_bias.data();
  attention.doc_start = tile.doc_start;
  attention.out = attended_.data();
  attention.lse = lse_.data();
  return attention;
}

void DeviceLayerBackward::forward(const Tile& tile) {
  const NvtxRange range("forward again");
  const ModelConfig& c = weights_.config;
  const DeviceLayerWeights& w = layer(tile.layer);
  const int64_t n = tile.n;
  rmsnorm(stream_, n, c.hidden, tile.x, w.attention_norm.data(), epsilon_of(c), normed_.data());
  matmul_.run(n, c.q_size(), c.hidden, normed_.data(), w.q.bf16.data(), q_.data());
  rotary(stream_, n, c.heads, c.head_dim, frequencies_.data(), static_cast<double>(tile.first_position), 1,
         q_.data(), c.q_size(), nullptr, RotaryDirection::kForward, exponent_factor(c.head_dim));
  attention_forward(stream_, attention_of(tile));
  copy_async(x_mid_.data(), tile.x, n * c.hidden, stream_);
  matmul_.run(n, c.hidden, c.q_size(), attended_.data(), w.o.bf16.data(), x_mid_.data(), Accumulate::kAdd);
  rmsnorm(stream_, n, c.hidden, x_mid_.data(), w.mlp_norm.data(), epsilon_of(c), mlp_normed_.data());
  matmul_.run(n, 2 * c.ffn, c.hidden, mlp_normed_.data(), w.gate_up.bf16.data(), gate_up_.data());
}

void DeviceLayerBackward::norm_backward(int64_t n, const BFloat16* x, const DeviceBuffer<float>& weight,
                                        const BFloat16* d_out, BFloat16* dx, float* d_weight) {
  check(n <= tile_, "a tile holds the tokens given to it");
  rmsnorm_backward(stream_, n, weights_.config.hidden, x, weight.data(), epsilon_of(weights_.config), d_out,
                   dx, d_weight, norm_workspace_.data());
}

void DeviceLayerBackward::attend(const Tile& tile, std::span<const BandGradient<BFloat16>> key_gradients,
                                 BFloat16* d_x, BFloat16* d_normed) {
  check(tile.n <= tile_, "a tile holds the tokens given to it");
  const ModelConfig& c = weights_.config;
  const DeviceLayerWeights& w = layer(tile.layer);
  const DeviceLayerGradients& g = gradients_.layer(tile.layer);
  const int64_t n = tile.n;
  forward(tile);

  const NvtxRange range("backward of a tile");
  // The MLP, down to x_mid.
  matmul_.input_gradient(n, c.hidden, c.ffn, d_x, w.down.bf16.data(), d_activated_.data());
  BFloat16* const d_gate_up = gate_up_.data();
  swiglu_backward(stream_, n, c.ffn, gate_up_.data(), d_activated_.data(), d_gate_up, activated_.data());
  matmul_.weight_gradient(n, c.hidden, c.ffn, d_x, activated_.data(), g.down);
  matmul_.input_gradient(n, 2 * c.ffn, c.hidden, d_gate_up, w.gate_up.bf16.data(), d_mlp_normed_.data());
  matmul_.weight_gradient(n, 2 * c.ffn, c.hidden, d_gate_up, mlp_normed_.data(), g.gate_up);
  norm_backward(n, x_mid_.data(), w.mlp_norm, d_mlp_normed_.data(), d_x, g.mlp_norm);

  // Attention, down to the normed input through Q, and to the keys and values.
  matmul_.input_gradient(n, c.hidden, c.q_size(), d_x, w.o.bf16.data(), d_attended_.data());
  matmul_.weight_gradient(n, c.hidden, c.q_size(), d_x, attended_.data(), g.o);
  AttentionGradient<BFloat16> attention;
  attention.forward = attention_of(tile);
  attention.forward.bands = tile.seen_bands;
  attention.d_out = d_attended_.data();
  attention.dq = d_q_.data();
  attention.d_bands = key_gradients;
  attention.d_landmark_bias = g.landmark_bias;
  attention.deterministic = deterministic_;
  const int64_t bytes = attention_backward_workspace(attention);
  if (attention_workspace_.bytes() < bytes) {
    attention_workspace_ = {};  // before the new one, so that both need not fit
    attention_workspace_ = DeviceBuffer<uint8_t>(bytes, "attention's gradient", stream_);
  }
  attention.workspace = attention_workspace_.data();
  attention_backward(stream_, attention);  // d_q of the queries as attention has them: turned and multiplied
  rotary(stream_, n, c.heads, c.head_dim, frequencies_.data(), static_cast<double>(tile.first_position), 1,
         d_q_.data(), c.q_size(), nullptr, RotaryDirection::kBackward, exponent_factor(c.head_dim));
  matmul_.input_gradient(n, c.q_size(), c.hidden, d_q_.data(), w.q.bf16.data(), d_normed);
  matmul_.weight_gradient(n, c.q_size(), c.hidden, d_q_.data(), normed_.data(), g.q);
}

void DeviceLayerBackward::keys(int64_t index, int64_t n, const BFloat16* x, const BFloat16* d_kv,
                               BFloat16* d_normed, BFloat16* d_x) {
  check(n <= tile_, "a tile holds the tokens given to it");
  const NvtxRange range("backward of keys");
  const ModelConfig& c = weights_.config;
  const DeviceLayerWeights& w = layer(index);
  const DeviceLayerGradients& g = gradients_.layer(index);
  const int64_t width = c.kv_size();
  rmsnorm(stream_, n, c.hidden, x, w.attention_norm.data(), epsilon_of(c), normed_.data());
  matmul_.input_gradient(n, 2 * width, c.hidden, d_kv, w.kv.bf16.data(), d_normed, Accumulate::kAdd);
  matmul_.weight_gradient(n, width, c.hidden, d_kv, normed_.data(), g.k, Accumulate::kAdd, 2 * width);
  matmul_.weight_gradient(n, width, c.hidden, d_kv + width, normed_.data(), g.v, Accumulate::kAdd, 2 * width);
  norm_backward(n, x, w.attention_norm, d_normed, d_x, g.attention_norm);
}

}  // namespace longhalo

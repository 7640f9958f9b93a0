#include "model/device_layer.hpp"

#include <algorithm>

#include "device/nvtx.hpp"
#include "kernels/embedding/embedding.hpp"
#include "kernels/quantize/quantize.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/rotary/rotary.hpp"
#include "kernels/swiglu/swiglu.hpp"

namespace longhalo {
namespace {

// Bytes of a row of a tile's buffers. In int8 only the head reads bf16.
struct RowBytes {
  int64_t operand, work;
  RowBytes(const ModelConfig& c, Precision precision)
      : operand(precision == Precision::kInt8
                    ? std::max({2 * c.hidden, c.q_size(), c.ffn})
                    : std::max({2 * c.hidden, c.q_size() + fp8_outliers(c, MatrixKind::kO), 2 * c.ffn})),
        work(4 * std::max(c.q_size(), c.ffn)) {}
};

DeviceBuffer<double> frequencies_of(const ModelConfig& c, cudaStream_t stream) {
  const std::vector<double> frequencies =
      rotary_frequencies(c.head_dim, c.rope_theta, c.rope_scaling ? &*c.rope_scaling : nullptr);
  return to_device<double>(frequencies, "rotary frequencies", stream);
}

float epsilon_of(const ModelConfig& c) {
  return static_cast<float>(c.rms_norm_epsilon);
}

}  // namespace

DeviceLayer::DeviceLayer(const DeviceWeights& weights, int64_t tile, DeviceMatmul& matmul,
                         cudaStream_t stream)
    : weights_(weights),
      tile_(tile),
      matmul_(matmul),
      stream_(stream),
      frequencies_(frequencies_of(weights.config, stream)) {
  check(tile >= 1, "a tile has at least one token");
  const RowBytes row(weights.config, weights.precision);
  operand_ = DeviceBuffer<uint8_t>(tile * row.operand, "normed activations of a tile", stream);
  scales_ = DeviceBuffer<float>(has_eight_bits(weights.precision) ? tile : 0, "scales of a tile", stream);
  work_ = DeviceBuffer<BFloat16>(tile * row.work / 2, "queries or MLP activations of a tile", stream);
}

int64_t DeviceLayer::bytes(const ModelConfig& config, Precision precision, int64_t tile) {
  const RowBytes row(config, precision);
  return tile * (row.operand + row.work + (has_eight_bits(precision) ? 4 : 0));
}

template <class To>
void DeviceLayer::write_operand(const DeviceMatrix& w, To to) {
  switch (w.form()) {
    case Precision::kFp8:
      return to(fp8_operand(w));
    case Precision::kInt8:
      return to(int8_operand());
    default:
      return to(bf16_operand());
  }
}

void DeviceLayer::norm(int64_t n, const BFloat16* x, const DeviceBuffer<float>& weight,
                       const DeviceMatrix& next) {
  write_operand(next, [&](const auto& out) {
    rmsnorm(stream_, n, config().hidden, x, weight.data(), epsilon_of(config()), out);
  });
}

// SwiGLU of the gates and ups in the work buffer.
void DeviceLayer::activate(int64_t n, const DeviceMatrix& next) {
  write_operand(next, [&](const auto& out) { swiglu(stream_, n, config().ffn, work_.data(), out); });
}

const BFloat16* DeviceLayer::operand_of(int64_t n, const BFloat16* x, const DeviceMatrix& w) {
  if (w.form() == Precision::kBf16) return x;
  if (w.form() == Precision::kFp8) quantize_rows(stream_, n, w.in, x, fp8_operand(w));
  if (w.form() == Precision::kInt8) quantize_rows(stream_, n, w.in, x, int8_operand());
  return bf16_operand();
}

// c = a W^T. In eight bits `a` is the operand buffer.
void DeviceLayer::product(int64_t n, const BFloat16* a, const DeviceMatrix& w, BFloat16* c,
                          Accumulate accumulate) {
  switch (w.form()) {
    case Precision::kFp8:
      return matmul_.run(n, w.out, w.in + w.outliers.size(), fp8_operand(w), w.fp8_rows(), c, accumulate,
                         w.bias.data());
    case Precision::kInt8:
      return matmul_.run(n, w.out, w.in, int8_operand(), w.int8_rows(), c, accumulate);
    default:
      if (see_) see_(w, a);
      return matmul_.run(n, w.out, w.in, a, w.bf16.data(), c, accumulate);
  }
}

void DeviceLayer::project_keys(int64_t layer, int64_t n, const BFloat16* x, BFloat16* kv) {
  const NvtxRange range("keys");
  const DeviceLayerWeights& w = layer_weights(layer);
  check(n <= tile_, "a tile holds the tokens given to it");
  enter(Phase::kKeys);
  norm(n, x, w.attention_norm, w.kv);
  product(n, bf16_operand(), w.kv, kv, Accumulate::kOverwrite);
}

RotateAndPool DeviceLayer::pooling(int64_t layer, std::span<PoolTarget> bands) const {
  const DeviceLayerWeights& w = layer_weights(layer);
  for (size_t band = 0; band < bands.size(); ++band)
    bands[band].landmark_query = w.landmark_query.empty() ? nullptr : w.landmark_query[band].data();
  return {config().kv_heads, config().head_dim, frequencies_.data(), bands};
}

void DeviceLayer::project_queries(int64_t layer, int64_t n, const BFloat16* x, int64_t first_position,
                                  const int64_t* position) {
  const NvtxRange range("queries");
  const ModelConfig& c = config();
  const DeviceLayerWeights& w = layer_weights(layer);
  check(n <= tile_, "a tile holds the tokens given to it");
  enter(Phase::kQueries);
  norm(n, x, w.attention_norm, w.q);
  product(n, bf16_operand(), w.q, work_.data(), Accumulate::kOverwrite);
  rotary(stream_, n, c.heads, c.head_dim, frequencies_.data(), static_cast<double>(first_position), 1,
         work_.data(), c.q_size(), position, RotaryDirection::kForward, exponent_factor(c.head_dim));
  first_position_ = first_position;
  position_ = position;
}

void DeviceLayer::attend(int64_t layer, int64_t n, std::span<const BandKeys<BFloat16>> bands, BFloat16* x,
                         const int64_t* doc_start) {
  const NvtxRange range("attention and MLP");
  const ModelConfig& c = config();
  const DeviceLayerWeights& w = layer_weights(layer);
  BFloat16* attended = work_.data() + tile_ * c.q_size();

  enter(Phase::kAttention);
  Attention<BFloat16> attention;
  attention.heads = c.heads;
  attention.kv_heads = c.kv_heads;
  attention.head_dim = c.head_dim;
  attention.scale = kExponentScale;
  attention.queries = n;
  attention.first_query = first_position_;
  attention.position = position_;
  attention.q = work_.data();
  attention.bands = bands;
  attention.landmark_bias = w.landmark_bias.data();
  attention.doc_start = doc_start;
  attention.out = attended;
  attention_forward(stream_, attention);

  enter(Phase::kMlp);
  product(n, operand_of(n, attended, w.o), w.o, x, Accumulate::kAdd);
  norm(n, x, w.mlp_norm, w.gate_up);
  product(n, bf16_operand(), w.gate_up, work_.data(), Accumulate::kOverwrite);
  activate(n, w.down);
  product(n, bf16_operand(), w.down, x, Accumulate::kAdd);
}

void DeviceLayer::embed(int64_t n, const int32_t* tokens, BFloat16* x) {
  embedding(stream_, n, config().hidden, tokens, weights_.embedding.data(), x);
}

void DeviceLayer::logits(int64_t n, const BFloat16* x, float* logits) {
  check(n <= tile_, "a tile holds the tokens given to it");
  final_norm(n, x, bf16_operand());
  matmul_.run(n, config().vocabulary, config().hidden, bf16_operand(), weights_.head(), logits);
}

void DeviceLayer::final_norm(int64_t n, const BFloat16* x, BFloat16* hidden) {
  rmsnorm(stream_, n, config().hidden, x, weights_.final_norm.data(), epsilon_of(config()), hidden);
}

}  // namespace longhalo

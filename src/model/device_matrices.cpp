#include "model/device_matrices.hpp"

#include <algorithm>

#include "core/text.hpp"
#include "kernels/common/int8.hpp"
#include "kernels/matmul/int8_matmul.hpp"

namespace longhalo {

MatrixShape matrix_shape(const ModelConfig& c, MatrixKind kind) {
  switch (kind) {
    case MatrixKind::kQ:
      return {c.q_size(), c.hidden};
    case MatrixKind::kKv:
      return {2 * c.kv_size(), c.hidden};
    case MatrixKind::kO:
      return {c.hidden, c.q_size()};
    case MatrixKind::kGateUp:
      return {2 * c.ffn, c.hidden};
    case MatrixKind::kDown:
      break;
  }
  return {c.hidden, c.ffn};
}

Precision matrix_form(const ModelConfig& config, Precision precision, MatrixKind kind, int64_t layer) {
  if (precision != Precision::kFp8) return precision;
  const bool first = config.layers > 2 && layer == 0;
  const bool last = config.layers > 2 && layer == config.layers - 1;
  const bool stays = kind == MatrixKind::kKv || (kind == MatrixKind::kDown && (first || last)) ||
                     (kind == MatrixKind::kGateUp && last);
  return stays ? Precision::kBf16 : Precision::kFp8;
}

int64_t fp8_outliers(const ModelConfig& config, MatrixKind kind) {
  constexpr int64_t kShare = 32, kMost = 1024;
  constexpr int64_t kMultiple = 16;  // as products in fp8 ask for
  if (kind == MatrixKind::kDown) return 0;
  const int64_t in = matrix_shape(config, kind).in;
  return std::min(kMost, (in + kShare * kMultiple - 1) / (kShare * kMultiple) * kMultiple);
}

double bf16_share_of_fp8(const ModelConfig& config) {
  int64_t all = 0, in_bf16 = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const MatrixKind kind : kMatrixKinds) {
      const int64_t elements = matrix_shape(config, kind).elements();
      all += elements;
      if (matrix_form(config, Precision::kFp8, kind, layer) == Precision::kBf16) in_bf16 += elements;
    }
  }
  return static_cast<double>(in_bf16) / static_cast<double>(all);
}

int64_t device_weights_bytes(const ModelConfig& c, Precision precision, int64_t strided_bands) {
  const auto matrix_bytes = [&](MatrixKind kind, int64_t layer) {
    const MatrixShape shape = matrix_shape(c, kind);
    switch (matrix_form(c, precision, kind, layer)) {
      case Precision::kFp8: {
        const int64_t outliers = fp8_outliers(c, kind);
        return shape.elements() + outliers * shape.out + 4 * (shape.out + outliers) +
               2 * (shape.in + shape.out);
      }
      case Precision::kInt8:
        return shape.elements() + 4 * shape.out;
      default:
        return 2 * shape.elements();
    }
  };
  int64_t matrices = 0;
  for (int64_t layer = 0; layer < c.layers; ++layer)
    for (const MatrixKind kind : kMatrixKinds)
      matrices += matrix_bytes(kind, layer);
  const int64_t vectors = 4 * (2 * c.hidden + c.heads + strided_bands * c.kv_size());
  const int64_t tables = c.tied_embeddings ? 1 : 2;
  return matrices + c.layers * vectors + 4 * c.hidden + 2 * tables * c.vocabulary * c.hidden;
}

std::optional<UserError> device_shape_objection(const ModelConfig& c, Precision precision,
                                                const std::string& origin) {
  if (c.head_dim != 64 && c.head_dim != 128)
    return UserError(text("a head dimension of ", c.head_dim, " is not supported on the GPU"), origin,
                     "the GPU takes 64 and 128; set run.device: cpu for this model");
  constexpr int64_t kBf16Multiple = 8;
  const int64_t multiple = precision == Precision::kInt8  ? kHadamardBlock
                           : precision == Precision::kFp8 ? 16
                                                          : kBf16Multiple;
  struct Size {
    const char* key;
    int64_t value;
  };
  for (const Size& size : {Size{"hidden_size", c.hidden}, {"intermediate_size", c.ffn}}) {
    const bool too_long = precision == Precision::kInt8 && size.value > kLongestInt8Sum;
    if (size.value % multiple == 0 && !too_long) continue;
    return UserError(
        text("\"", size.key, "\" is ", size.value, ", which the GPU's products in ", name_of(precision),
             " do not take"),
        origin,
        text("it must be a multiple of ", multiple,
             precision == Precision::kInt8 ? text(", ", kLongestInt8Sum, " at most") : "",
             size.value % kBf16Multiple == 0 ? "; set run.precision: bf16 for this model"
                                             : "; set run.device: cpu and no run.precision for this model"));
  }
  return std::nullopt;
}

}  // namespace longhalo

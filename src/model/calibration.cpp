#include "model/calibration.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.hpp"
#include "device/stream.hpp"
#include "kernels/quantize/quantize_for_inputs.hpp"
#include "model/device_context.hpp"

namespace longhalo {
namespace {

constexpr int64_t kLeanedOn = 4;  // tokens at the beginning that do not count
constexpr const char* kPurpose = "calibrating weights";

}  // namespace

Calibration::Calibration(const DeviceWeights& weights, std::span<const int32_t> tokens, cudaStream_t stream)
    : stream_(stream),
      tokens_(std::min(kCalibrationTokens, static_cast<int64_t>(tokens.size()))),
      matmul_(stream, kMatmulWorkspaceBytes, MatmulTuning::kHeuristic),
      layer_(weights, tokens_, matmul_, stream),
      residual_(tokens_ * weights.config.hidden, kPurpose, stream),
      kv_(tokens_ * 2 * weights.config.kv_size(), kPurpose, stream) {
  const std::span<const int32_t> taken = tokens.first(static_cast<size_t>(tokens_));
  check(std::all_of(taken.begin(), taken.end(),
                    [&](int32_t token) { return token >= 0 && token < weights.config.vocabulary; }),
        "a token id lies inside the vocabulary");
  const DeviceBuffer<int32_t> ids = to_device<int32_t>(taken, kPurpose, stream);
  layer_.embed(tokens_, ids.data(), residual_.data());
}

int64_t Calibration::bytes(const ModelConfig& c, int64_t tokens) {
  const int64_t n = std::min(kCalibrationTokens, tokens);
  int64_t covariances = 0, widest = 0, largest = 0, most_rows = 0;
  for (const MatrixKind kind : kMatrixKinds) {
    if (kind == MatrixKind::kKv) continue;  // stays in bf16
    const MatrixShape shape = matrix_shape(c, kind);
    covariances += 2 * shape.in * shape.in;
    widest = std::max(widest, shape.in);
    largest = std::max(largest, shape.elements());
    most_rows = std::max(most_rows, shape.out);
  }
  const int64_t of_tokens = n * (2 * c.hidden + 4 * c.kv_size()) + DeviceLayer::bytes(c, Precision::kBf16, n);
  // While a covariance is found, or while a matrix is rounded for one (quantize_for_inputs.hpp).
  return kMatmulWorkspaceBytes + of_tokens + covariances +
         std::max(4 * widest * widest + 2 * n * widest, 7 * largest + 128 * most_rows);
}

void Calibration::quantise(int64_t index, std::span<DeviceMatrix* const> matrices) {
  std::map<const DeviceMatrix*, Inputs> inputs;
  layer_.watch([&](const DeviceMatrix& w, const BFloat16* a) {
    if (std::find(matrices.begin(), matrices.end(), &w) != matrices.end()) inputs[&w] = inputs_of(w, a);
  });
  layer_.project_keys(index, tokens_, residual_.data(), kv_.data());
  rotate_and_pool(stream_, layer_.pooling(index, {}), tokens_, 0, kv_.data(), nullptr);
  const int64_t row_elements = 2 * layer_.config().kv_size();
  const BandKeys<BFloat16> keys[] = {rows_as_band({}, kv_.data(), row_elements, 0, tokens_)};
  layer_.project_queries(index, tokens_, residual_.data(), 0);
  layer_.attend(index, tokens_, keys, residual_.data());
  layer_.watch({});
  for (DeviceMatrix* w : matrices)
    quantise(*w, std::move(inputs.at(w)));
}

Calibration::Inputs Calibration::inputs_of(const DeviceMatrix& w, const BFloat16* a) {
  const int64_t skipped = tokens_ > 2 * kLeanedOn ? kLeanedOn : 0;
  Inputs inputs{{w.in, kPurpose, stream_}, {w.in * w.in, kPurpose, stream_}, {w.out, kPurpose, stream_}, {}};
  mean_and_covariance(matmul_, stream_, tokens_ - skipped, w.in, a + skipped * w.in, inputs.mean.data(),
                      inputs.covariance.data());
  inputs.outliers =
      to_device<int32_t>(find_outliers(stream_, w.out, w.in, w.bf16.data(), inputs.covariance.data(),
                                       fp8_outliers(layer_.config(), w.kind)),
                         kPurpose, stream_);
  matmul_.run(1, w.out, w.in, inputs.mean.data(), w.bf16.data(), inputs.bias.data());
  return inputs;
}

void Calibration::quantise(DeviceMatrix& w, Inputs inputs) {
  w.scales = DeviceBuffer<float>(w.out, "scales of weights", stream_);
  w.outliers = std::move(inputs.outliers);
  const int64_t columns = w.in + w.outliers.size();
  w.fp8 = DeviceBuffer<Fp8E4M3>(w.out * columns, "weights in fp8", stream_);
  quantize_rows_for_inputs(
      matmul_, stream_, w.out, w.in, w.bf16.data(), inputs.covariance.data(),
      {.values = w.fp8.data(), .scales = w.scales.data(), .outliers = w.outlier_columns()});
  w.bf16 = {};
  w.mean = std::move(inputs.mean);
  w.bias = std::move(inputs.bias);
  std::vector<BFloat16> mean(static_cast<size_t>(w.in));
  to_host<BFloat16>(mean, w.mean.data(), stream_);
  for (const BFloat16 x : mean)
    w.largest_mean = std::max(w.largest_mean, std::abs(to_float(x)));
}

}  // namespace longhalo

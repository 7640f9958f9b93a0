#include "model/input_means.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.hpp"
#include "device/stream.hpp"
#include "model/device_context.hpp"

namespace longhalo {
namespace {

constexpr int64_t kLeanedOn = 4;   // tokens at the beginning that do not count
constexpr int64_t kOneColumn = 8;  // elements: rows of a product are 16-byte aligned
constexpr const char* kPurpose = "means of activations";

int64_t counted_of(int64_t tokens) {
  return tokens > 2 * kLeanedOn ? tokens - kLeanedOn : tokens;
}

}  // namespace

InputMeans::InputMeans(const DeviceWeights& weights, std::span<const int32_t> tokens, cudaStream_t stream)
    : stream_(stream),
      tokens_(std::min(kCalibrationTokens, static_cast<int64_t>(tokens.size()))),
      counted_(counted_of(tokens_)),
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
  std::vector<BFloat16> ones(static_cast<size_t>(tokens_ * kOneColumn));
  for (int64_t token = tokens_ - counted_; token < tokens_; ++token)
    ones[static_cast<size_t>(token * kOneColumn)] = to_bfloat16(1);
  ones_ = to_device<BFloat16>(ones, kPurpose, stream);
}

void InputMeans::find(DeviceLayerWeights& layer, int64_t index) {
  std::map<const DeviceMatrix*, Mean> means;
  layer_.watch([&](const DeviceMatrix& w, int64_t n, const BFloat16* a) { means[&w] = mean_of(w, n, a); });
  layer_.project_keys(index, tokens_, residual_.data(), kv_.data());
  rotate_and_pool(stream_, layer_.pooling(index, {}), tokens_, 0, kv_.data(), nullptr);
  const int64_t row_elements = 2 * layer_.config().kv_size();
  const BandKeys<BFloat16> keys[] = {rows_as_band({}, kv_.data(), row_elements, 0, tokens_)};
  layer_.project_queries(index, tokens_, residual_.data(), 0);
  layer_.attend(index, tokens_, keys, residual_.data());
  layer_.watch({});
  for (DeviceMatrix* w : {&layer.q, &layer.kv, &layer.o, &layer.gate_up, &layer.down}) {
    Mean& found = means.at(w);
    w->mean = std::move(found.mean);
    w->bias = std::move(found.bias);
    w->largest_mean = found.largest;
  }
}

// The sum over tokens is a product: with ones where a token counts.
InputMeans::Mean InputMeans::mean_of(const DeviceMatrix& w, int64_t n, const BFloat16* a) {
  DeviceBuffer<float> sums(w.in, kPurpose, stream_);
  matmul_.weight_gradient(n, 1, w.in, ones_.data(), a, sums.data(), Accumulate::kOverwrite, kOneColumn);
  std::vector<float> host(static_cast<size_t>(w.in));
  to_host<float>(host, sums.data(), stream_);
  Mean found;
  std::vector<BFloat16> mean;
  for (const float sum : host) {
    mean.push_back(to_bfloat16(sum / static_cast<float>(counted_)));
    found.largest = std::max(found.largest, std::abs(to_float(mean.back())));
  }
  found.mean = to_device<BFloat16>(mean, kPurpose, stream_);
  found.bias = DeviceBuffer<BFloat16>(w.out, kPurpose, stream_);
  matmul_.run(1, w.out, w.in, found.mean.data(), w.bf16.data(), found.bias.data());
  return found;
}

}  // namespace longhalo

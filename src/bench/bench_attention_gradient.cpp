#include "bench/bench_attention_gradient.hpp"

#include <algorithm>
#include <cmath>

#include "device/cuda_check.hpp"
#include "kernels/random/fill_normal.hpp"

namespace longhalo {
namespace {

constexpr int64_t kSampledRows = 64;  // of each array
constexpr uint64_t kSeed = 977;

// Calls take(row) for rows spread over [0, count).
template <class Take>
void for_sampled_rows(int64_t count, const Take& take) {
  const int64_t rows = std::min(count, kSampledRows);
  for (int64_t i = 0; i < rows; ++i)
    take(rows == 1 ? 0 : i * (count - 1) / (rows - 1));
}

}  // namespace

AttentionGradientRun::AttentionGradientRun(cudaStream_t stream, const Attention<BFloat16>& forward)
    : stream_(stream),
      d_out_(forward.queries * forward.heads * forward.head_dim, "gradients of attention output", stream),
      dq_(d_out_.size(), "gradients of queries", stream),
      d_bias_(forward.heads, "gradients of the landmark bias", stream) {
  fill_normal(stream, d_out_.size(), kSeed, 0, 1, d_out_.data());
  gradient_.forward = forward;
  gradient_.d_out = d_out_.data();
  gradient_.dq = dq_.data();
  gradient_.d_landmark_bias = d_bias_.data();
  const int64_t width = forward.kv_heads * forward.head_dim;
  for (const BandKeys<BFloat16>& keys : forward.bands) {
    key_gradients_.emplace_back(keys.count * 2 * width, "gradients of keys and values", stream);
    float* const rows = key_gradients_.back().data();
    d_bands_.push_back({rows, keys.count > 0 ? rows + width : nullptr, 2 * width});
  }
  gradient_.d_bands = d_bands_;
  workspace_ = DeviceBuffer<unsigned char>(attention_backward_workspace(gradient_),
                                           "the workspace of attention's gradient", stream);
  gradient_.workspace = workspace_.data();
}

void AttentionGradientRun::run(AttentionKernel kernel, bool deterministic) {
  gradient_.deterministic = deterministic;
  attention_backward(stream_, gradient_, kernel);
}

AttentionGradientRun::Samples AttentionGradientRun::sampled_run(AttentionKernel kernel, bool deterministic) {
  for (DeviceBuffer<float>& rows : key_gradients_)
    check_cuda(cudaMemsetAsync(rows.data(), 0, static_cast<size_t>(rows.bytes()), stream_),
               "clearing gradients");
  run(kernel, deterministic);
  Samples samples;
  const auto take = [&]<class T>(const T* row, int64_t width) {
    std::vector<T> values(static_cast<size_t>(width));
    to_host<T>(values, row, stream_);
    for (const T value : values) {
      if constexpr (std::is_same_v<T, BFloat16>)
        samples.values.push_back(to_float(value));
      else
        samples.values.push_back(value);
    }
  };
  const Attention<BFloat16>& p = gradient_.forward;
  for_sampled_rows(p.queries, [&](int64_t row) {
    take(static_cast<const BFloat16*>(dq_.data()) + row * p.heads * p.head_dim, p.heads * p.head_dim);
  });
  const int64_t width = 2 * p.kv_heads * p.head_dim;
  for (size_t band = 0; band < p.bands.size(); ++band)
    for_sampled_rows(p.bands[band].count, [&](int64_t row) {
      take(static_cast<const float*>(key_gradients_[band].data()) + row * width, width);
    });
  return samples;
}

double AttentionGradientRun::difference_from_portable(AttentionKernel kernel, bool deterministic) {
  attention_forward(stream_, gradient_.forward);
  const Samples got = sampled_run(kernel, deterministic);
  const Samples right = sampled_run(AttentionKernel::kPortable, true);
  double difference = 0, size = 0;
  for (size_t i = 0; i < right.values.size(); ++i) {
    difference += std::pow(got.values[i] - right.values[i], 2);
    size += std::pow(right.values[i], 2);
  }
  return std::sqrt(difference / size);
}

}  // namespace longhalo

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.hpp"
#include "device/host_buffer.hpp"
#include "kernels/cross_entropy/cross_entropy.hpp"
#include "kernels/logits/logits_simd.hpp"
#include "kernels/matmul/matmul.hpp"

namespace longhalo {
namespace {

constexpr int64_t kTileFloats = int64_t{1} << 24;
constexpr int64_t kLeastRows = 64;  // fewer would make the products wait for memory

struct RowLoss {
  double loss = 0, z_loss = 0;
};

// The loss of one row; its logits become the gradient of scale * loss.
RowLoss row_loss(const CrossEntropy<float>& p, int32_t label, bool gradient, float* logits) {
  const LogitsKernels& kernels = LONGHALO_SIMD(logits_kernels);
  const float top = kernels.largest(p.vocabulary, logits);
  const double sum = std::isfinite(top) ? kernels.sum_exp(p.vocabulary, logits, top) : 1;
  const double lse = static_cast<double>(top) + std::log(sum);
  const auto z = static_cast<double>(p.z_loss), scale = static_cast<double>(p.scale);
  const RowLoss row{lse - static_cast<double>(logits[label]), z * lse * lse};
  if (gradient) {
    kernels.scaled_exp(p.vocabulary, top, static_cast<float>(scale * (1 + 2 * z * lse) / sum), logits);
    logits[label] -= p.scale;
  }
  return row;
}

}  // namespace

CrossEntropySums cross_entropy(const CrossEntropy<float>& p) {
  check(p.n >= 0 && p.hidden >= 1 && p.vocabulary >= 1, "cross-entropy has a positive shape");
  check(std::all_of(
            p.labels, p.labels + p.n,
            [&](int32_t label) { return label == kIgnoredLabel || (label >= 0 && label < p.vocabulary); }),
        "labels lie in the vocabulary or are ignored");
  if (p.n == 0) return {};
  const bool gradient = p.d_x != nullptr || p.d_head != nullptr;
  const int64_t most = std::min(p.n, std::max(kLeastRows, kTileFloats / p.vocabulary));
  HostBuffer<float> logits(most * p.vocabulary, "a tile of logits");
  std::vector<RowLoss> losses(static_cast<size_t>(most));
  CrossEntropySums sums;
  for (int64_t first = 0; first < p.n; first += most) {
    const int64_t rows = std::min(most, p.n - first);
    const int32_t* labels = p.labels + first;
    const int64_t count = rows - std::count(labels, labels + rows, kIgnoredLabel);
    if (count == 0) continue;
    const float* x = p.x + first * p.hidden;
    matmul(rows, p.vocabulary, p.hidden, x, p.head, logits.data());
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
    for (int64_t i = 0; i < rows; ++i) {
      float* row = logits.data() + i * p.vocabulary;
      if (labels[i] == kIgnoredLabel) {
        losses[static_cast<size_t>(i)] = {};
        std::fill_n(row, p.vocabulary, 0.0F);
      } else {
        losses[static_cast<size_t>(i)] = row_loss(p, labels[i], gradient, row);
      }
    }
    sums.count += count;
    for (int64_t i = 0; i < rows; ++i) {
      sums.loss += losses[static_cast<size_t>(i)].loss;
      sums.z_loss += losses[static_cast<size_t>(i)].z_loss;
    }
    if (p.d_x != nullptr)
      matmul_input_gradient(rows, p.vocabulary, p.hidden, logits.data(), p.head, p.d_x + first * p.hidden,
                            Accumulate::kAdd);
    if (p.d_head != nullptr)
      matmul_weight_gradient(rows, p.vocabulary, p.hidden, logits.data(), x, p.d_head, Accumulate::kAdd);
  }
  return sums;
}

}  // namespace longhalo

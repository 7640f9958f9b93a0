// A whole model in fp64, built from the kernels' plain references and nothing else: one rank, the whole
// sequence, no tiles, no halo, no context. The judge of prefill and decode.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/attention_pattern.hpp"
#include "model/weights.hpp"

namespace longhalo::test {

/// Hidden states after the final norm, [N, D]. `doc_start` [N], or empty for one document.
std::vector<double> reference_hidden(const Weights& weights, const AttentionPattern& pattern,
                                     std::span<const int32_t> tokens,
                                     std::span<const int64_t> doc_start = {});

/// Sum over tokens with a label (not negative) of cross-entropy + z_loss * log(softmax's denominator)^2.
double reference_loss(const Weights& weights, const AttentionPattern& pattern,
                      std::span<const int32_t> tokens, std::span<const int32_t> labels,
                      std::span<const int64_t> doc_start, double z_loss);

/// A small random model whose landmark queries, biases and norms are random too.
Weights small_model(int64_t layers, int64_t heads, int64_t kv_heads, int64_t strided_bands, uint64_t seed);
Weights small_model(const ModelConfig& config, int64_t strided_bands, uint64_t seed);

std::vector<int32_t> random_tokens(int64_t count, int64_t vocabulary, uint64_t seed);

/// ||a - b|| / ||b||, Frobenius; infinity when a holds a NaN.
double relative_error(std::span<const float> a, std::span<const double> b);
double relative_error(std::span<const float> a, std::span<const float> b);

}  // namespace longhalo::test

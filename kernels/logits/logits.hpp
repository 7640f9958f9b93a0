// What is asked of a row of logits [V]: the log-probability of a token, the most likely token, a sample.
#pragma once

#include <cstdint>

#include "core/bfloat16.hpp"
#include "device/stream_handle.hpp"

namespace longhalo {

/// log sum exp over a row, stable, for each of n rows: logits [n, V] -> out [n]. Sums in double.
void log_sum_exp(int64_t n, int64_t vocabulary, const float* logits, double* out);

/// Index of the largest logit; the lowest index wins a tie. NaN is an invariant error.
int64_t argmax(int64_t vocabulary, const float* logits);

/// Nucleus sampling (Holtzman et al. 2020): softmax(logits / temperature), the smallest set of most likely
/// tokens with mass >= top_p, renormalised; `uniform` in [0, 1) picks. temperature > 0, 0 < top_p <= 1.
int64_t sample_top_p(int64_t vocabulary, const float* logits, double temperature, double top_p,
                     double uniform);

/// GPU: natural log-probability of labels[i] under logits[i]: logits [n, V] fp32, labels [n], out [n], all in
/// device memory. Labels lie in [0, V): the caller has checked them.
void label_log_probabilities(StreamHandle stream, int64_t n, int64_t vocabulary, const float* logits,
                             const int32_t* labels, float* out);

/// GPU: index of the largest of logits [V]; the lowest index wins a tie; -1 when one is NaN.
void argmax(StreamHandle stream, int64_t vocabulary, const float* logits, int32_t* index);

}  // namespace longhalo

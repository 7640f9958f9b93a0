// What is asked of a row of logits [V]: the log-probability of a token, the most likely token, a sample.
#pragma once

#include <cstdint>

namespace longhalo {

/// log sum exp over a row, stable, for each of n rows: logits [n, V] -> out [n]. Sums in double.
void log_sum_exp(int64_t n, int64_t vocabulary, const float* logits, double* out);

/// Index of the largest logit; the lowest index wins a tie. NaN is an invariant error.
int64_t argmax(int64_t vocabulary, const float* logits);

/// Nucleus sampling (Holtzman et al. 2020): softmax(logits / temperature), the smallest set of most likely
/// tokens with mass >= top_p, renormalised; `uniform` in [0, 1) picks. temperature > 0, 0 < top_p <= 1.
int64_t sample_top_p(int64_t vocabulary, const float* logits, double temperature, double top_p,
                     double uniform);

}  // namespace longhalo

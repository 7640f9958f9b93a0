// Answers one query: reads its prompt into a context, then samples token after token until an end token or a
// limit.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/decoder.hpp"

namespace longhalo {

struct GenerateOptions {
  int64_t max_new_tokens = 128;
  double temperature = 0;  // 0: greedy
  double top_p = 1;
  uint64_t seed = 0;  // the same seed gives the same answer on any number of ranks
};

enum class FinishReason { kEndToken, kLength };

struct Generation {
  std::vector<int32_t> tokens;  // without the end token
  FinishReason finish_reason = FinishReason::kLength;
  double first_token_seconds = 0;  // from the start of the query
  double seconds = 0;              // whole query
};

/// Extends `context` by `prompt` (at least one token) and the answer. `end_tokens` end an answer.
/// `on_token` is called after each new token.
Generation generate(Decoder& decoder, Context& context, std::span<const int32_t> prompt,
                    std::span<const int32_t> end_tokens, const GenerateOptions& options,
                    const std::function<void()>& on_token = {});

}  // namespace longhalo

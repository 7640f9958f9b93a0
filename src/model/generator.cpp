#include "model/generator.hpp"

#include <algorithm>
#include <random>

#include "core/clock.hpp"
#include "kernels/logits/logits.hpp"

namespace longhalo {

int32_t CpuContinuation::most_likely() {
  return static_cast<int32_t>(argmax(static_cast<int64_t>(logits_.size()), logits_.data()));
}

Generation generate(Continuation& continuation, std::span<const int32_t> prompt,
                    std::span<const int32_t> end_tokens, const GenerateOptions& options,
                    const std::function<void()>& on_token) {
  const Stopwatch watch;
  std::mt19937_64 random(options.seed);
  Generation answer;
  const auto choose = [&]() -> int32_t {
    // 53 random bits: the same on every standard library, unlike uniform_real_distribution.
    const double uniform = static_cast<double>(random() >> 11) * 0x1.0p-53;
    if (options.temperature == 0) return continuation.most_likely();
    const std::span<const float> logits = continuation.logits();
    return static_cast<int32_t>(sample_top_p(static_cast<int64_t>(logits.size()), logits.data(),
                                             options.temperature, options.top_p, uniform));
  };
  continuation.extend(prompt);
  while (static_cast<int64_t>(answer.tokens.size()) < options.max_new_tokens) {
    const int32_t token = choose();
    if (answer.first_token_seconds == 0) answer.first_token_seconds = watch.seconds();
    if (std::find(end_tokens.begin(), end_tokens.end(), token) != end_tokens.end()) {
      answer.finish_reason = FinishReason::kEndToken;
      break;
    }
    answer.tokens.push_back(token);
    if (on_token) on_token();
    if (static_cast<int64_t>(answer.tokens.size()) < options.max_new_tokens)
      continuation.extend(std::span(&token, 1));
  }
  answer.seconds = watch.seconds();
  return answer;
}

}  // namespace longhalo

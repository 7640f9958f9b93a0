// Answers one query: reads its prompt into a context, then samples token after token until an end token or a
// limit. The device computes what a Continuation is asked for; choosing the token is the host's.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/decoder.hpp"

namespace longhalo {

/// A context of its own that one query extends, on any device.
class Continuation {
 public:
  virtual ~Continuation() = default;
  /// Appends `tokens` (at least one).
  virtual void extend(std::span<const int32_t> tokens) = 0;
  /// After the last token: the most likely next one (the lowest of several), and all logits [V], valid until
  /// the next call.
  virtual int32_t most_likely() = 0;
  virtual std::span<const float> logits() = 0;
};

/// On the CPU, over a decoder and a context that outlive it.
class CpuContinuation : public Continuation {
 public:
  CpuContinuation(Decoder& decoder, Context& context) : decoder_(decoder), context_(context) {}
  void extend(std::span<const int32_t> tokens) override { logits_ = decoder_.extend(context_, tokens); }
  int32_t most_likely() override;
  std::span<const float> logits() override { return logits_; }

 private:
  Decoder& decoder_;
  Context& context_;
  std::span<const float> logits_;
};

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

/// Extends `continuation` by `prompt` (at least one token) and the answer. `end_tokens` end an answer.
/// `on_token` is called after each new token.
Generation generate(Continuation& continuation, std::span<const int32_t> prompt,
                    std::span<const int32_t> end_tokens, const GenerateOptions& options,
                    const std::function<void()>& on_token = {});

}  // namespace longhalo

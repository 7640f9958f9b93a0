#include "model/outputs.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/logits/logits.hpp"
#include "model/layer.hpp"
#include "model/output_parts.hpp"

namespace longhalo {
namespace {

constexpr int64_t kNormTile = 256;

// Rows of logits that fit about 32 MiB.
int64_t logit_rows(int64_t vocabulary) {
  return std::clamp<int64_t>((int64_t{8} << 20) / vocabulary, 1, 256);
}

}  // namespace

void require_finite(const ModelConfig& config, const TokenRange& shard, const float* residual) {
  for (int64_t token = shard.begin; token < shard.end; ++token) {
    const float* row = residual + (token - shard.begin) * config.hidden;
    float squares = 0;
    for (int64_t c = 0; c < config.hidden; ++c)
      squares += row[c] * row[c];
    if (!std::isfinite(squares)) refuse_not_finite(token);
  }
}

std::vector<float> score_tokens(const MpiSession& session, const Weights& weights, const ShardPlan& shards,
                                std::span<const int32_t> tokens, const float* residual,
                                const RowProgress& progress) {
  const ModelConfig& c = weights.config;
  const TokenRange shard = shards.shard(session.rank());
  const int64_t tile = std::min(logit_rows(c.vocabulary), std::max<int64_t>(shard.size(), 1));
  HostBuffer<float> hidden(tile * c.hidden, "hidden states of a tile");
  HostBuffer<float> logits(tile * c.vocabulary, "logits of a tile");
  std::vector<double> normaliser(static_cast<size_t>(tile));

  // Row i predicts token i + 1, so a shard yields the scores of (begin, end], and rank 0 also that of token
  // 0.
  std::vector<float> scores;
  if (shard.begin == 0 && !shard.empty()) scores.push_back(0);
  for (int64_t at = shard.begin; at < shard.end; at += tile) {
    const int64_t rows =
        std::min(tile, std::min(shard.end, shards.tokens() - 1) - at);  // the last token has no label
    if (rows <= 0) break;
    final_norm(weights, rows, residual + (at - shard.begin) * c.hidden, hidden.data());
    logits_of(weights, rows, hidden.data(), logits.data());
    log_sum_exp(rows, c.vocabulary, logits.data(), normaliser.data());
    for (int64_t row = 0; row < rows; ++row) {
      const float logit = logits[row * c.vocabulary + tokens[static_cast<size_t>(at + row + 1)]];
      scores.push_back(static_cast<float>(logit - normaliser[static_cast<size_t>(row)]));
    }
    if (progress) progress(at + rows - shard.begin, shard.size());
  }
  return gather_scores(session, scores);
}

std::vector<float> embed_chunks(const MpiSession& session, const Weights& weights, const ShardPlan& shards,
                                const float* residual, int64_t chunk_tokens, int64_t first_token) {
  const int64_t hidden_size = weights.config.hidden;
  const TokenRange shard = shards.shard(session.rank());
  const ShardChunks chunks = shard_chunks(shards, session.rank(), chunk_tokens, first_token);
  std::vector<double> sums(static_cast<size_t>(chunks.count * hidden_size), 0.0);
  HostBuffer<float> hidden(kNormTile * hidden_size, "hidden states of a tile");
  for (int64_t at = chunks.tokens.begin; at < chunks.tokens.end; at += kNormTile) {
    const int64_t rows = std::min(kNormTile, chunks.tokens.end - at);
    final_norm(weights, rows, residual + (at - shard.begin) * hidden_size, hidden.data());
    for (int64_t row = 0; row < rows; ++row) {
      double* sum = sums.data() + (at + row - chunks.first_chunk_begin) / chunk_tokens * hidden_size;
      const float* state = hidden.data() + row * hidden_size;
      for (int64_t c = 0; c < hidden_size; ++c)
        sum[c] += state[c];
    }
  }
  return chunk_means(session, shards, sums, hidden_size, chunk_tokens, first_token);
}

}  // namespace longhalo

#include "model/device_outputs.hpp"

#include <algorithm>
#include <bit>

#include "kernels/chunk_sums/chunk_sums.hpp"
#include "kernels/finite/first_not_finite.hpp"
#include "kernels/logits/logits.hpp"
#include "model/output_parts.hpp"
#include "model/run_ahead.hpp"

namespace longhalo {
namespace {

constexpr int64_t kNormTile = 4096;
constexpr size_t kTilesAhead = 16;

// Rows of logits that fit 256 MiB: enough for a product at full speed.
int64_t logit_rows(int64_t vocabulary) {
  const auto fitting = static_cast<uint64_t>((int64_t{64} << 20) / vocabulary);
  return std::clamp<int64_t>(static_cast<int64_t>(std::bit_floor(fitting)), 16, 1024);
}

int64_t largest_shard(const ShardPlan& shards) {
  int64_t most = 0;
  for (int rank = 0; rank < shards.ranks(); ++rank)
    most = std::max(most, shards.shard(rank).size());
  return most;
}

}  // namespace

void require_finite(const DevicePrefill& prefill) {
  const TokenRange shard = prefill.shard();
  if (shard.empty()) return;
  cudaStream_t stream = prefill.layer().stream();
  DeviceBuffer<int64_t> first(1, "a row number", stream);
  first_not_finite(stream, shard.size(), prefill.layer().config().hidden, prefill.residual(), first.data());
  int64_t row = 0;
  to_host<int64_t>(std::span(&row, 1), first.data(), stream);
  if (row < shard.size()) refuse_not_finite(shard.begin + row);
}

std::vector<float> score_tokens(const MpiSession& session, DevicePrefill& prefill, const ShardPlan& shards,
                                std::span<const int32_t> tokens, const RowProgress& progress) {
  DeviceLayer& layer = prefill.layer();
  const ModelConfig& c = layer.config();
  cudaStream_t stream = layer.stream();
  const TokenRange shard = prefill.shard();
  // Row i predicts token i + 1, so a shard yields the scores of (begin, end], and rank 0 also that of token
  // 0. The last token has no label.
  const int64_t rows = std::max<int64_t>(0, std::min(shard.end, shards.tokens() - 1) - shard.begin);
  const bool first = shard.begin == 0 && !shard.empty();
  std::vector<float> scores(static_cast<size_t>(rows + (first ? 1 : 0)), 0.0F);
  if (rows > 0) {
    const int64_t tile = std::min({logit_rows(c.vocabulary), layer.tile(), rows});
    DeviceBuffer<float> logits(tile * c.vocabulary, "logits of a tile", stream);
    DeviceBuffer<float> own(rows, "scores", stream);
    const DeviceBuffer<int32_t> labels = to_device<int32_t>(
        tokens.subspan(static_cast<size_t>(shard.begin + 1), static_cast<size_t>(rows)), "labels", stream);
    RunAhead run_ahead(stream, kTilesAhead, [&](int64_t done) {
      if (progress) progress(done, rows);
    });
    for (int64_t at = 0; at < rows; at += tile) {
      const int64_t n = std::min(tile, rows - at);
      layer.logits(n, prefill.residual() + at * c.hidden, logits.data());
      label_log_probabilities(stream, n, c.vocabulary, logits.data(), labels.data() + at, own.data() + at);
      run_ahead.queued(n);
    }
    run_ahead.finish();
    to_host<float>(std::span(scores).last(static_cast<size_t>(rows)), own.data(), stream);
  }
  return gather_scores(session, scores);
}

std::vector<float> embed_chunks(const MpiSession& session, DevicePrefill& prefill, const ShardPlan& shards,
                                int64_t chunk_tokens, int64_t first_token) {
  DeviceLayer& layer = prefill.layer();
  const int64_t hidden_size = layer.config().hidden;
  cudaStream_t stream = layer.stream();
  const TokenRange shard = prefill.shard();
  const ShardChunks chunks = shard_chunks(shards, session.rank(), chunk_tokens, first_token);
  std::vector<double> own(static_cast<size_t>(chunks.count * hidden_size));
  if (!own.empty()) {
    DeviceBuffer<double> sums(chunks.count * hidden_size, "sums of chunks", stream);
    DeviceBuffer<BFloat16> hidden(std::min(kNormTile, chunks.tokens.size()) * hidden_size,
                                  "hidden states of a tile", stream);
    check_cuda(cudaMemsetAsync(sums.data(), 0, static_cast<size_t>(sums.bytes()), stream), "clearing sums");
    for (int64_t at = chunks.tokens.begin; at < chunks.tokens.end; at += kNormTile) {
      const int64_t n = std::min(kNormTile, chunks.tokens.end - at);
      layer.final_norm(n, prefill.residual() + (at - shard.begin) * hidden_size, hidden.data());
      add_chunk_sums(stream, n, hidden_size, hidden.data(), at - chunks.first_chunk_begin, chunk_tokens,
                     sums.data());
    }
    to_host<double>(own, sums.data(), stream);
  }
  return chunk_means(session, shards, own, hidden_size, chunk_tokens, first_token);
}

int64_t score_bytes(const ModelConfig& config, const ShardPlan& shards) {
  constexpr int64_t kFloat = sizeof(float);
  return logit_rows(config.vocabulary) * config.vocabulary * kFloat + 2 * largest_shard(shards) * kFloat;
}

int64_t embed_bytes(const ModelConfig& config, const ShardPlan& shards, int64_t chunk_tokens) {
  const int64_t chunks = largest_shard(shards) / chunk_tokens + 2;
  return config.hidden *
         (chunks * static_cast<int64_t>(sizeof(double)) + kNormTile * static_cast<int64_t>(sizeof(BFloat16)));
}

}  // namespace longhalo

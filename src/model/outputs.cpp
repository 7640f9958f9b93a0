#include "model/outputs.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "comm/halo_plan.hpp"
#include "comm/message_parts.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "kernels/logits/logits.hpp"
#include "model/layer.hpp"

namespace longhalo {
namespace {

constexpr int64_t kNormTile = 256;

// Rows of logits that fit about 32 MiB.
int64_t logit_rows(int64_t vocabulary) {
  return std::clamp<int64_t>((int64_t{8} << 20) / vocabulary, 1, 256);
}

// Concatenates the ranks' parts on rank 0, in rank order. Parts may be of any size.
template <class T>
std::vector<T> gather_parts(const MpiSession& session, const std::vector<T>& part) {
  constexpr int kTag = 21;
  const auto count = static_cast<int64_t>(part.size());
  std::vector<int64_t> counts(static_cast<size_t>(session.ranks()));
  check_mpi(MPI_Allgather(&count, 1, MPI_INT64_T, counts.data(), 1, MPI_INT64_T, session.comm()),
            "MPI_Allgather");
  const auto element_bytes = static_cast<int64_t>(sizeof(T));
  if (!session.is_root()) {
    for_each_message(reinterpret_cast<const char*>(part.data()), count * element_bytes,
                     [&](const char* at, int bytes) {
                       check_mpi(MPI_Send(at, bytes, MPI_BYTE, 0, kTag, session.comm()), "MPI_Send");
                     });
    return {};
  }
  std::vector<T> all = part;
  all.resize(static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})));
  T* next = all.data() + count;
  for (int peer = 1; peer < session.ranks(); ++peer) {
    const int64_t of_peer = counts[static_cast<size_t>(peer)];
    for_each_message(reinterpret_cast<char*>(next), of_peer * element_bytes, [&](char* at, int bytes) {
      check_mpi(MPI_Recv(at, bytes, MPI_BYTE, peer, kTag, session.comm(), MPI_STATUS_IGNORE), "MPI_Recv");
    });
    next += of_peer;
  }
  return all;
}

}  // namespace

void require_finite(const ModelConfig& config, const TokenRange& shard, const float* residual) {
  for (int64_t token = shard.begin; token < shard.end; ++token) {
    const float* row = residual + (token - shard.begin) * config.hidden;
    float squares = 0;
    for (int64_t c = 0; c < config.hidden; ++c)
      squares += row[c] * row[c];
    if (std::isfinite(squares)) continue;
    throw UserError(
        "the model's hidden state is infinite or no number", text("token ", token, " of the sequence"),
        "check that weights and config.json belong together; values beyond fp32 are not supported");
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
  return gather_parts(session, scores);
}

std::vector<float> embed_chunks(const MpiSession& session, const Weights& weights, const ShardPlan& shards,
                                const float* residual, int64_t chunk_tokens, int64_t first_token) {
  const int64_t hidden_size = weights.config.hidden;
  const TokenRange embedded{first_token, shards.tokens()};
  const auto chunk_of = [&](int64_t token) { return (token - first_token) / chunk_tokens; };

  // A chunk may lie on two ranks or more: each gives its partial sum, rank 0 adds them in rank order.
  const TokenRange shard = shards.shard(session.rank());
  const TokenRange own = intersect(embedded, shard);
  const int64_t first_chunk = own.empty() ? 0 : chunk_of(own.begin);
  const int64_t chunks = own.empty() ? 0 : chunk_of(own.end - 1) - first_chunk + 1;
  std::vector<double> sums(static_cast<size_t>(chunks * hidden_size), 0.0);
  HostBuffer<float> hidden(kNormTile * hidden_size, "hidden states of a tile");
  for (int64_t at = own.begin; at < own.end; at += kNormTile) {
    const int64_t rows = std::min(kNormTile, own.end - at);
    final_norm(weights, rows, residual + (at - shard.begin) * hidden_size, hidden.data());
    for (int64_t row = 0; row < rows; ++row) {
      double* sum = sums.data() + (chunk_of(at + row) - first_chunk) * hidden_size;
      const float* state = hidden.data() + row * hidden_size;
      for (int64_t c = 0; c < hidden_size; ++c)
        sum[c] += state[c];
    }
  }

  const std::vector<double> parts = gather_parts(session, sums);
  if (!session.is_root() || embedded.empty()) return {};
  const int64_t all_chunks = chunk_of(embedded.end - 1) + 1;
  std::vector<double> totals(static_cast<size_t>(all_chunks * hidden_size), 0.0);
  auto part = parts.begin();
  for (const RowTransfer& owned : rows_by_owner(shards, embedded))
    for (int64_t chunk = chunk_of(owned.range.begin); chunk <= chunk_of(owned.range.end - 1); ++chunk)
      for (int64_t c = 0; c < hidden_size; ++c)
        totals[static_cast<size_t>(chunk * hidden_size + c)] += *part++;
  std::vector<float> means(totals.size());
  for (int64_t chunk = 0; chunk < all_chunks; ++chunk) {
    const int64_t members = std::min(chunk_tokens, embedded.size() - chunk * chunk_tokens);
    for (int64_t c = 0; c < hidden_size; ++c) {
      const auto at = static_cast<size_t>(chunk * hidden_size + c);
      means[at] = static_cast<float>(totals[at] / static_cast<double>(members));
    }
  }
  return means;
}

}  // namespace longhalo

#include "model/output_parts.hpp"

#include <algorithm>
#include <numeric>

#include "comm/halo_plan.hpp"
#include "comm/message_parts.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"

namespace longhalo {
namespace {

// Concatenates the ranks' parts on rank 0, in rank order. Parts may be of any size.
template <class T>
std::vector<T> gather_parts(const MpiSession& session, const std::vector<T>& part) {
  constexpr int kTag = 21;
  const auto count = static_cast<int64_t>(part.size());
  std::vector<int64_t> counts(static_cast<size_t>(session.ranks()));
  const Waiting waiting("the sizes of results");
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
      const Waiting waiting("a part of the results", {&peer, 1});
      check_mpi(MPI_Recv(at, bytes, MPI_BYTE, peer, kTag, session.comm(), MPI_STATUS_IGNORE), "MPI_Recv");
    });
    next += of_peer;
  }
  return all;
}

}  // namespace

void refuse_not_finite(int64_t token) {
  throw UserError("the model's hidden state is infinite or no number",
                  text("token ", token, " of the sequence"),
                  "check that weights and config.json belong together; values beyond fp32 are not supported");
}

std::vector<float> gather_scores(const MpiSession& session, const std::vector<float>& part) {
  return gather_parts(session, part);
}

ShardChunks shard_chunks(const ShardPlan& shards, int rank, int64_t chunk_tokens, int64_t first_token) {
  ShardChunks chunks;
  chunks.tokens = intersect({first_token, shards.tokens()}, shards.shard(rank));
  if (chunks.tokens.empty()) return chunks;
  chunks.first = (chunks.tokens.begin - first_token) / chunk_tokens;
  chunks.count = (chunks.tokens.end - 1 - first_token) / chunk_tokens - chunks.first + 1;
  chunks.first_chunk_begin = first_token + chunks.first * chunk_tokens;
  return chunks;
}

std::vector<float> chunk_means(const MpiSession& session, const ShardPlan& shards,
                               const std::vector<double>& sums, int64_t hidden, int64_t chunk_tokens,
                               int64_t first_token) {
  const TokenRange embedded{first_token, shards.tokens()};
  const auto chunk_of = [&](int64_t token) { return (token - first_token) / chunk_tokens; };
  const std::vector<double> parts = gather_parts(session, sums);
  if (!session.is_root() || embedded.empty()) return {};
  const int64_t all_chunks = chunk_of(embedded.end - 1) + 1;
  std::vector<double> totals(static_cast<size_t>(all_chunks * hidden), 0.0);
  auto part = parts.begin();
  for (const RowTransfer& owned : rows_by_owner(shards, embedded))
    for (int64_t chunk = chunk_of(owned.range.begin); chunk <= chunk_of(owned.range.end - 1); ++chunk)
      for (int64_t c = 0; c < hidden; ++c)
        totals[static_cast<size_t>(chunk * hidden + c)] += *part++;
  std::vector<float> means(totals.size());
  for (int64_t chunk = 0; chunk < all_chunks; ++chunk) {
    const int64_t members = std::min(chunk_tokens, embedded.size() - chunk * chunk_tokens);
    for (int64_t c = 0; c < hidden; ++c) {
      const auto at = static_cast<size_t>(chunk * hidden + c);
      means[at] = static_cast<float>(totals[at] / static_cast<double>(members));
    }
  }
  return means;
}

}  // namespace longhalo

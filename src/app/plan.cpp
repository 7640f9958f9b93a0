#include "app/plan.hpp"

#include <algorithm>
#include <fstream>
#include <limits>

#include "core/error.hpp"
#include "core/text.hpp"
#include "kernels/matmul/matmul.hpp"
#include "model/prefill.hpp"
#include "telemetry/progress.hpp"

namespace longhalo {
namespace {

// What the kernel says can still be allocated on this host; without it, no limit is known.
int64_t available_host_bytes() {
  std::ifstream in("/proc/meminfo");
  for (std::string key; in >> key;) {
    int64_t kibibytes = 0;
    if (key == "MemAvailable:" && in >> kibibytes) return kibibytes * 1024;
  }
  return std::numeric_limits<int64_t>::max();
}

}  // namespace

PrefillFlops prefill_flops(const ModelConfig& config, const AttentionPattern& pattern, int64_t tokens) {
  PrefillFlops flops;
  const int64_t layer_products =
      config.hidden * (2 * config.q_size() + 2 * config.kv_size() + 3 * config.ffn);
  flops.products = 2.0 * static_cast<double>(config.layers * layer_products) * static_cast<double>(tokens);
  flops.attention = 4.0 * static_cast<double>(config.q_size() * config.layers) *
                    static_cast<double>(sequence_visible_pairs(pattern, tokens));
  return flops;
}

double measured_matmul_rate(const MpiSession& session) {
  check_mpi(MPI_Barrier(session.comm()), "MPI_Barrier");
  return spread_over_ranks(session, measure_matmul_rate(0.5)).mean * session.ranks();
}

std::string JobPlan::describe() const {
  return text("plan: ", tokens, " tokens on ", ranks, " ranks, at most ", tokens_per_rank, " each; bands ",
              pattern, "; ", bytes_per_rank / 1'000'000, " MB a rank to allocate; prefill about ",
              duration_text(seconds), " or more");
}

void JobPlan::require_memory() const {
  if (bytes_per_rank <= available_bytes) return;
  throw UserError(
      text("this document needs ", bytes_per_rank / 1'000'000, " MB more on every rank, but this host has ",
           available_bytes / 1'000'000, " MB left for each"),
      text(tokens, " tokens, bands ", pattern),
      "use more hosts, fewer ranks a host, a smaller window, or a shorter document");
}

JobPlan plan_document(const MpiSession& session, const Weights& weights, const AttentionPattern& pattern,
                      const ShardPlan& shards, int64_t tile, double matmul_rate, const Work& work) {
  const ModelConfig& c = weights.config;
  JobPlan plan;
  plan.tokens = shards.tokens();
  plan.ranks = session.ranks();
  for (int rank = 0; rank < shards.ranks(); ++rank)
    plan.tokens_per_rank = std::max(plan.tokens_per_rank, shards.shard(rank).size());
  plan.pattern = pattern.describe();
  plan.bytes_per_rank = Prefill::estimate_bytes(c, pattern, shards, tile);
  if (!work.prompts.empty()) {
    int64_t rows = std::min(pattern.exact_reach(), plan.tokens);
    for (const int64_t stride : pattern.strides())
      rows += plan.tokens / stride;
    const int64_t context = 2 * rows * c.kv_size() * c.layers * static_cast<int64_t>(sizeof(float));
    plan.bytes_per_rank +=
        context + context * 9 / 4;  // the document's, and a query's copy with its slack while it grows
  }
  if (work.score_array) plan.bytes_per_rank += int64_t{33} << 20;
  plan.available_bytes = available_host_bytes() / session.local_ranks();
  plan.seconds = prefill_flops(c, pattern, plan.tokens).total() / matmul_rate;
  return plan;
}

}  // namespace longhalo

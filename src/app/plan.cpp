#include "app/plan.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>

#include "core/error.hpp"
#include "core/text.hpp"
#include "kernels/matmul/matmul.hpp"
#include "model/prefill.hpp"
#include "telemetry/progress.hpp"

namespace longhalo {
namespace {

// The number in a file, or the one after `key` in a file of keys and numbers; -1 where there is none ("max"
// too).
int64_t number_in(const std::filesystem::path& file, const std::string& key = "") {
  std::ifstream in(file);
  std::string word;
  while (!key.empty() && in >> word && word != key) {
  }
  int64_t number = -1;
  return in >> number ? number : -1;
}

// What the control groups of this process (a Slurm job's memory limit) still allow; unlimited where none
// limits it.
int64_t available_group_bytes() {
  int64_t available = std::numeric_limits<int64_t>::max();
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::/")) continue;  // version 2
    std::filesystem::path group = std::filesystem::path("/sys/fs/cgroup") / line.substr(4);
    for (; group != "/sys/fs"; group = group.parent_path()) {
      const int64_t most = number_in(group / "memory.max");
      const int64_t now = number_in(group / "memory.current");
      const int64_t files =
          std::max<int64_t>(0, number_in(group / "memory.stat", "file"));  // given back when asked for
      if (most >= 0 && now >= 0) available = std::min(available, most - now + files);
    }
  }
  return available;
}

// What can still be allocated on this host; where nothing says, no limit is known.
int64_t available_host_bytes() {
  const int64_t group = available_group_bytes();
  std::ifstream in("/proc/meminfo");
  for (std::string key; in >> key;) {
    int64_t kibibytes = 0;
    if (key == "MemAvailable:" && in >> kibibytes) return std::min(group, kibibytes * 1024);
  }
  return group;
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
                      const ShardPlan& shards, int64_t tile, double matmul_rate, const Work& work,
                      int64_t chunk_tokens) {
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
  if (work.embed_array) {  // rank 0 holds sums of all ranks, totals (fp64) and means (fp32), other ranks
                           // their sums
    const int64_t values = (plan.tokens / chunk_tokens + 1) * c.hidden;
    plan.bytes_per_rank +=
        values * (3 * static_cast<int64_t>(sizeof(double)) + static_cast<int64_t>(sizeof(float)));
  }
  plan.available_bytes = available_host_bytes() / session.local_ranks();
  plan.seconds = prefill_flops(c, pattern, plan.tokens).total() / matmul_rate;
  return plan;
}

}  // namespace longhalo

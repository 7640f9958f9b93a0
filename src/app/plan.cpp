#include "app/plan.hpp"

#include <algorithm>
#include <numeric>
#include <optional>

#include "core/error.hpp"
#include "core/text.hpp"
#include "model/prefill.hpp"
#include "telemetry/progress.hpp"

namespace longhalo {
namespace {

constexpr int64_t kSmallestAutomaticTile = 1024;
constexpr int64_t kSmallestTile = 128;
constexpr int kMostRanks = 1 << 16;

int64_t sum_of(const std::vector<MemoryItem>& items) {
  return std::accumulate(items.begin(), items.end(), int64_t{0},
                         [](int64_t sum, const MemoryItem& item) { return sum + item.bytes; });
}

std::string items_text(const std::vector<MemoryItem>& items) {
  std::string words;
  for (const MemoryItem& item : items)
    words += text(words.empty() ? "" : ", ", item.name, " ", item.bytes / 1'000'000, " MB");
  return words;
}

// Asks what would fit into the memory of a rank.
class Fitting {
 public:
  Fitting(const Engine& engine, const Wanted& wanted, int64_t available_bytes)
      : engine_(engine), wanted_(wanted), available_bytes_(available_bytes) {}

  bool fits(const ShardPlan& shards, int64_t tile) const {
    return sum_of(engine_.memory(shards, tile, wanted_)) <= available_bytes_;
  }
  bool fits(int64_t tokens, int ranks, int64_t tile) const {
    return fits(plan_shards(engine_.config(), engine_.pattern(), tokens, ranks), tile);
  }

  /// The largest tile below `tile` that fits, by halving.
  std::optional<int64_t> tile_below(const ShardPlan& shards, int64_t tile) const {
    for (int64_t smaller = tile / 2; smaller >= kSmallestTile; smaller /= 2)
      if (fits(shards, smaller)) return smaller;
    return std::nullopt;
  }
  std::optional<int> ranks_above(int64_t tokens, int ranks, int64_t tile) const {
    for (int more = ranks * 2; more <= kMostRanks; more *= 2) {
      if (!fits(tokens, more, tile)) continue;
      int too_few = more / 2;
      while (more - too_few > 1) {
        const int middle = too_few + (more - too_few) / 2;
        (fits(tokens, middle, tile) ? more : too_few) = middle;
      }
      return more;
    }
    return std::nullopt;
  }
  int64_t most_tokens(int64_t tokens, int ranks, int64_t tile) const {
    int64_t few = 0, many = tokens;
    while (many - few > std::max<int64_t>(1, few / 128)) {
      const int64_t middle = few + (many - few) / 2;
      (fits(middle, ranks, tile) ? few : many) = middle;
    }
    return few;
  }

 private:
  const Engine& engine_;
  const Wanted& wanted_;
  int64_t available_bytes_;
};

std::string remedy_for(const Fitting& fitting, const ShardPlan& shards, int64_t tile) {
  std::string words;
  const auto offer = [&](const std::string& option) { words += (words.empty() ? "" : "; or ") + option; };
  if (const auto smaller = fitting.tile_below(shards, tile)) offer(text("set run.token_tile: ", *smaller));
  if (const auto more = fitting.ranks_above(shards.tokens(), shards.ranks(), tile))
    offer(text("use ", *more, " ranks, each with as much memory as this one"));
  const int64_t fewer = fitting.most_tokens(shards.tokens(), shards.ranks(), tile);
  if (fewer > 0) offer(text("read at most about ", fewer, " tokens"));
  if (words.empty()) words = "not even a short document fits: use a smaller model, or hosts with more memory";
  return words;
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

double work_of_shard(const ModelConfig& config, const AttentionPattern& pattern, const TokenRange& shard) {
  if (shard.empty()) return 0;
  return prefill_flops(config, pattern, shard.end).total() -
         prefill_flops(config, pattern, shard.begin).total();
}

MatmulRates measured_matmul_rates(const MpiSession& session, Engine& engine) {
  wait_for_all(session);
  MatmulRates own;
  session.together([&] { own = engine.measure_rates(0.5); });
  return {spread_over_ranks(session, own.products).mean * session.ranks(),
          spread_over_ranks(session, own.attention).mean * session.ranks()};
}

double products_alone_seconds(const PrefillFlops& flops, const MatmulRates& rates) {
  return flops.products / rates.products + flops.attention / rates.attention;
}

int64_t JobPlan::bytes() const {
  return sum_of(items);
}

std::string JobPlan::describe() const {
  return text("plan: ", tokens, " tokens on ", ranks, " ranks, at most ", tokens_per_rank,
              " each, in tiles of ", tile, "; bands ", pattern, "; memory of a rank: ", items_text(items),
              ", in all ", bytes() / 1'000'000, " of ", available_bytes / 1'000'000, " MB of ", place,
              "; prefill about ", duration_text(seconds), " or more");
}

void JobPlan::require_memory() const {
  if (bytes() <= available_bytes) return;
  throw UserError(text("this document needs ", bytes() / 1'000'000, " MB on every rank (", items_text(items),
                       "), but ", place, " has ", available_bytes / 1'000'000, " MB for each"),
                  text(tokens, " tokens on ", ranks, " ranks, bands ", pattern, ", run.token_tile ", tile),
                  remedy);
}

JobPlan plan_document(const MpiSession& session, const Engine& engine, const ShardPlan& shards, int64_t tile,
                      const MatmulRates& rates, const Wanted& wanted) {
  JobPlan plan;
  plan.tokens = shards.tokens();
  plan.ranks = session.ranks();
  for (int rank = 0; rank < shards.ranks(); ++rank)
    plan.tokens_per_rank = std::max(plan.tokens_per_rank, shards.shard(rank).size());
  plan.pattern = engine.pattern().describe();
  plan.place = engine.memory_place();
  plan.available_bytes = engine.available_bytes();

  const Fitting fitting(engine, wanted, plan.available_bytes);
  plan.tile = tile > 0 ? tile : engine.default_tile();
  while (tile == 0 && plan.tile > kSmallestAutomaticTile && !fitting.fits(shards, plan.tile))
    plan.tile /= 2;
  // Tiles of one size on all ranks: the smallest that any rank chose.
  plan.tile = static_cast<int64_t>(spread_over_ranks(session, static_cast<double>(plan.tile)).min);
  plan.items = engine.memory(shards, plan.tile, wanted);
  if (plan.bytes() > plan.available_bytes) plan.remedy = remedy_for(fitting, shards, plan.tile);
  plan.seconds = products_alone_seconds(prefill_flops(engine.config(), engine.pattern(), plan.tokens), rates);
  return plan;
}

}  // namespace longhalo

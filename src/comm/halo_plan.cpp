#include "comm/halo_plan.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace longhalo {
namespace {

TokenRange halo_of(const ShardPlan& shards, int rank, int64_t halo) {
  const TokenRange shard = shards.shard(rank);
  if (shard.empty()) return {shard.begin, shard.begin};
  return {shard.begin - std::min(halo, shard.begin), shard.begin};
}

}  // namespace

std::vector<int> peers_of(const std::vector<RowTransfer>& transfers, std::vector<int> peers) {
  for (const RowTransfer& transfer : transfers)
    if (std::find(peers.begin(), peers.end(), transfer.peer) == peers.end()) peers.push_back(transfer.peer);
  return peers;
}

HaloPlan halo_plan(const ShardPlan& shards, int rank, int64_t halo) {
  check(halo >= 0, "a halo is not negative");
  HaloPlan plan;
  plan.halo = halo_of(shards, rank, halo);
  plan.receives = rows_by_owner(shards, plan.halo);
  for (int peer = rank + 1; peer < shards.ranks(); ++peer) {
    const TokenRange to_peer = intersect(halo_of(shards, peer, halo), shards.shard(rank));
    if (!to_peer.empty()) plan.sends.push_back({peer, to_peer});
  }
  return plan;
}

std::vector<RowTransfer> rows_by_owner(const ShardPlan& shards, TokenRange range) {
  std::vector<RowTransfer> parts;
  if (range.empty()) return parts;
  for (int owner = shards.owner(range.begin); owner < shards.ranks(); ++owner) {
    const TokenRange part = intersect(range, shards.shard(owner));
    if (!part.empty()) parts.push_back({owner, part});
  }
  return parts;
}

}  // namespace longhalo

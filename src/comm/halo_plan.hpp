// Which rows (keys and values of tokens) travel between which ranks. Pure arithmetic, no MPI.
//
// Halo: a rank needs the `halo` tokens before its shard. Where shards are shorter than that, they come from
// several ranks to the left. Rank 0 receives nothing: there is no wrap-around.
#pragma once

#include <vector>

#include "comm/shard_plan.hpp"

namespace longhalo {

/// Rows of tokens [range.begin, range.end) that go to or come from `peer`.
struct RowTransfer {
  int peer = 0;
  TokenRange range;
  bool operator==(const RowTransfer&) const = default;
};

/// What one rank receives and sends, each in ascending order of peer.
struct HaloPlan {
  TokenRange halo;  // all rows this rank receives: [begin - halo, begin), clipped at 0
  std::vector<RowTransfer> receives;
  std::vector<RowTransfer> sends;
};

/// The ranks of these transfers, each once. Pure.
std::vector<int> peers_of(const std::vector<RowTransfer>& transfers, std::vector<int> peers = {});

/// The tokens [begin - halo, begin) before the shard of `rank`, clipped at 0; a rank that owns nothing wants
/// nothing.
HaloPlan halo_plan(const ShardPlan& shards, int rank, int64_t halo);

/// `range` cut into the parts that each rank owns, in ascending order; `peer` is the owner.
std::vector<RowTransfer> rows_by_owner(const ShardPlan& shards, TokenRange range);

}  // namespace longhalo

// Who owns which tokens: contiguous shards of ONE sequence, in rank order. Pure arithmetic, no MPI.
//
// Shards begin at multiples of an alignment A = lcm(128, all strides), so a landmark's segment never
// straddles two ranks. Blocks of A tokens are dealt out so that every rank has about the same work: later
// tokens see more landmarks than early ones, so equal shards would leave the first ranks waiting. The last
// shard may be short and a rank may own nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace longhalo {

/// Half-open range of global token positions.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
  bool operator==(const TokenRange&) const = default;
};

/// The common part of two ranges (possibly empty).
TokenRange intersect(TokenRange a, TokenRange b);

/// lcm(128, strides...). Throws UserError when that exceeds 2^40: such strides cannot be sharded sensibly.
int64_t shard_alignment(std::span<const int64_t> strides);

class ShardPlan {
 public:
  /// Shards of equal length. tokens >= 0, ranks >= 1, alignment >= 1.
  ShardPlan(int64_t tokens, int ranks, int64_t alignment);
  /// Shards of equal work: `work(i)` is what the token at position i costs, in any unit; it must be positive
  /// and is looked at once a block, 131072 times at most. The same arguments give the same plan on every
  /// rank.
  ShardPlan(int64_t tokens, int ranks, int64_t alignment, const std::function<double(int64_t)>& work);

  int64_t tokens() const { return begins_.back(); }
  int ranks() const { return static_cast<int>(begins_.size()) - 1; }
  TokenRange shard(int rank) const;
  /// The rank that owns token `position`, 0 <= position < tokens().
  int owner(int64_t position) const;
  /// Complete segments of `stride` tokens that begin in the shard of `rank`: global segment indices [begin,
  /// end).
  TokenRange segments(int rank, int64_t stride) const;

 private:
  std::vector<int64_t> begins_;  // [ranks + 1], non-decreasing
};

}  // namespace longhalo

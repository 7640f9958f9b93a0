#include "comm/shard_plan.hpp"

#include <algorithm>
#include <numeric>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {

TokenRange intersect(TokenRange a, TokenRange b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

int64_t shard_alignment(std::span<const int64_t> strides) {
  constexpr int64_t kLargest = int64_t{1} << 40;
  int64_t alignment = 128;
  for (const int64_t stride : strides) {
    check(stride >= 1, "a stride is at least 1");
    const int64_t factor = stride / std::gcd(alignment, stride);
    if (factor > kLargest / alignment)
      throw UserError(text("the strides have no common multiple below ", kLargest, " tokens"),
                      "attention.bands", "choose strides that divide each other, such as 64, 2048");
    alignment *= factor;
  }
  return alignment;
}

ShardPlan::ShardPlan(int64_t tokens, int ranks, int64_t alignment) {
  check(tokens >= 0 && ranks >= 1 && alignment >= 1,
        "a shard plan has tokens >= 0, ranks >= 1, alignment >= 1");
  const int64_t blocks = tokens / alignment + (tokens % alignment != 0);
  const int64_t each = blocks / ranks, more = blocks % ranks;
  begins_.reserve(static_cast<size_t>(ranks) + 1);
  for (int64_t rank = 0; rank <= ranks; ++rank) {
    const int64_t block = rank * each + std::min(rank, more);
    // NOTE: the last block may reach beyond the last token; block * alignment could then overflow near 2^63.
    begins_.push_back(block >= blocks ? tokens : block * alignment);
  }
}

ShardPlan::ShardPlan(int64_t tokens, int ranks, int64_t alignment,
                     const std::function<double(int64_t)>& work) {
  check(tokens >= 0 && ranks >= 1 && alignment >= 1,
        "a shard plan has tokens >= 0, ranks >= 1, alignment >= 1");
  // Of sequences that no memory holds, blocks are dealt out several at a time: a plan costs milliseconds, so
  // that it can be refused.
  constexpr int64_t kMostBlocks = int64_t{1} << 17;
  const int64_t all = tokens / alignment + (tokens % alignment != 0);
  const int64_t together = all / kMostBlocks + (all % kMostBlocks != 0);
  std::vector<double> work_before{0};  // of all blocks before this one
  for (int64_t block = 0; block < all; block += together) {
    const int64_t begin = block * alignment;
    // NOTE: the last one may reach beyond the last token; its end could then overflow near 2^63.
    const int64_t size = block + together >= all ? tokens - begin : together * alignment;
    const double cost = work(begin + size / 2) * static_cast<double>(size);
    check(cost > 0, "the work of a token is positive");
    work_before.push_back(work_before.back() + cost);
  }
  // Each boundary is the block edge whose share of the work is nearest to the rank's.
  for (int rank = 0; rank <= ranks; ++rank) {
    const double wanted = work_before.back() * rank / ranks;
    auto edge = std::lower_bound(work_before.begin(), work_before.end(), wanted);
    if (edge == work_before.end()) --edge;
    if (edge != work_before.begin() && wanted - *(edge - 1) < *edge - wanted) --edge;
    const int64_t block = (edge - work_before.begin()) * together;
    begins_.push_back(block >= all ? tokens : block * alignment);
  }
  begins_.back() = tokens;
}

TokenRange ShardPlan::shard(int rank) const {
  check(rank >= 0 && rank < ranks(), "a shard belongs to an existing rank");
  return {begins_[static_cast<size_t>(rank)], begins_[static_cast<size_t>(rank) + 1]};
}

int ShardPlan::owner(int64_t position) const {
  check(position >= 0 && position < tokens(), "an owned position lies inside the sequence");
  return static_cast<int>(std::upper_bound(begins_.begin(), begins_.end(), position) - begins_.begin()) - 1;
}

TokenRange ShardPlan::segments(int rank, int64_t stride) const {
  const TokenRange own = shard(rank);
  const int64_t begin = own.begin / stride + (own.begin % stride != 0);
  return {begin, std::max(begin, own.end / stride)};
}

}  // namespace longhalo

// Shard and halo plans are pure arithmetic: checked token by token against their definitions.
#include <gtest/gtest.h>

#include <numeric>

#include "comm/halo_plan.hpp"
#include "comm/message_parts.hpp"
#include "comm/shard_plan.hpp"
#include "core/error.hpp"

namespace longhalo {
namespace {

TEST(ShardPlan, OwnsEveryTokenOnceInOrderFromAlignedStarts) {
  for (const int64_t tokens : {0, 1, 127, 128, 129, 1000, 4096, 99991}) {
    for (const int ranks : {1, 2, 3, 4, 7, 64}) {
      for (const int64_t alignment : {1, 128, 384}) {
        const ShardPlan plan(tokens, ranks, alignment);
        ASSERT_EQ(plan.ranks(), ranks);
        ASSERT_EQ(plan.tokens(), tokens);
        int64_t next = 0, longest = 0, shortest_whole = tokens;
        for (int rank = 0; rank < ranks; ++rank) {
          const TokenRange shard = plan.shard(rank);
          ASSERT_EQ(shard.begin, next);
          ASSERT_LE(shard.begin, shard.end);
          if (!shard.empty()) {
            ASSERT_EQ(shard.begin % alignment, 0);
            ASSERT_EQ(plan.owner(shard.begin), rank);
            ASSERT_EQ(plan.owner(shard.end - 1), rank);
          }
          longest = std::max(longest, shard.size());
          if (shard.end != tokens) shortest_whole = std::min(shortest_whole, shard.size());
          next = shard.end;
        }
        ASSERT_EQ(next, tokens);
        ASSERT_LE(longest - std::min(longest, shortest_whole), alignment)
            << "shards differ by one block at most";
      }
    }
  }
}

// Work grows along the sequence, as with landmarks: shards get shorter, and no rank has more than its share
// and a block.
TEST(ShardPlan, BalancesWork) {
  for (const int64_t tokens : {0, 1, 129, 5000, 99991}) {
    for (const int ranks : {1, 2, 3, 7}) {
      const auto work = [](int64_t i) { return 100.0 + static_cast<double>(i) / 50; };
      const ShardPlan plan(tokens, ranks, 128, work);
      double total = 0, largest_block = 0;
      for (int64_t i = 0; i < tokens; ++i)
        total += work(i);
      if (tokens > 0) largest_block = 128 * work(tokens - 1);
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const TokenRange shard = plan.shard(rank);
        ASSERT_EQ(shard.begin, next);
        ASSERT_LE(shard.begin, shard.end);
        ASSERT_TRUE(shard.empty() || shard.begin % 128 == 0);
        double own = 0;
        for (int64_t i = shard.begin; i < shard.end; ++i)
          own += work(i);
        EXPECT_LE(own, total / ranks + largest_block);
        next = shard.end;
      }
      ASSERT_EQ(next, tokens);
      EXPECT_TRUE(tokens < 90000 || ranks == 1 || plan.shard(0).size() > plan.shard(ranks - 1).size());
    }
  }
  const ShardPlan alike(4096, 4, 128, [](int64_t) { return 3.0; });
  for (int rank = 0; rank < 4; ++rank)
    EXPECT_EQ(alike.shard(rank).size(), 1024);
}

TEST(ShardPlan, SurvivesTheLargestLengths) {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  const ShardPlan plan(huge, 3, 2048);
  EXPECT_EQ(plan.shard(2).end, huge);
  EXPECT_EQ(plan.shard(1).begin % 2048, 0);
  EXPECT_EQ(plan.owner(huge - 1), 2);
  // The same by work, which is asked for 131072 times at most.
  int64_t asked = 0;
  const ShardPlan by_work(huge, 3, 2048, [&](int64_t) { return static_cast<double>(++asked > 0); });
  EXPECT_LE(asked, 1 << 17);
  EXPECT_EQ(by_work.shard(2).end, huge);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(by_work.shard(rank).begin % 2048, 0);
    EXPECT_NEAR(static_cast<double>(by_work.shard(rank).size()) / static_cast<double>(huge), 1.0 / 3, 1e-4);
  }
}

TEST(ShardPlan, SegmentsFollowEachOtherAndAreComplete) {
  for (const int64_t tokens : {1, 255, 256, 1000, 5000}) {
    for (const int ranks : {1, 3, 7}) {
      const std::vector<int64_t> strides{4, 64, 96};
      const ShardPlan plan(tokens, ranks, shard_alignment(strides));
      for (const int64_t stride : strides) {
        int64_t next = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const TokenRange segments = plan.segments(rank, stride);
          if (segments.empty()) continue;
          EXPECT_EQ(segments.begin, next);
          EXPECT_GE(segments.begin * stride, plan.shard(rank).begin);
          EXPECT_LE(segments.end * stride, plan.shard(rank).end);
          next = segments.end;
        }
        EXPECT_EQ(next, tokens / stride);
      }
    }
  }
}

TEST(ShardAlignment, IsTheLeastCommonMultiple) {
  EXPECT_EQ(shard_alignment(std::vector<int64_t>{}), 128);
  EXPECT_EQ(shard_alignment(std::vector<int64_t>{2048}), 2048);
  EXPECT_EQ(shard_alignment(std::vector<int64_t>{3, 64}), 384);
  EXPECT_THROW(shard_alignment(std::vector<int64_t>{999999937, 999999929}), UserError);
}

// Every rank's halo is exactly [begin - halo, begin) clipped at 0, each part from its owner, and sends mirror
// receives.
TEST(HaloPlan, BringsEveryWantedTokenFromItsOwner) {
  for (const int64_t tokens : {1, 128, 500, 896, 2000}) {
    for (const int ranks : {1, 2, 3, 4, 7}) {
      const ShardPlan shards(tokens, ranks, 128);
      for (const int64_t halo : {int64_t{0}, int64_t{1}, int64_t{127}, int64_t{200}, int64_t{5000}}) {
        for (int rank = 0; rank < ranks; ++rank) {
          const HaloPlan plan = halo_plan(shards, rank, halo);
          const TokenRange shard = shards.shard(rank);
          const int64_t wanted = shard.empty() ? shard.begin : std::max<int64_t>(0, shard.begin - halo);
          EXPECT_EQ(plan.halo.begin, wanted);
          EXPECT_EQ(plan.halo.end, shard.begin);
          int64_t next = wanted;
          for (const RowTransfer& part : plan.receives) {
            EXPECT_LT(part.peer, rank) << "a halo comes from the left";
            EXPECT_EQ(part.range.begin, next);
            EXPECT_EQ(intersect(part.range, shards.shard(part.peer)), part.range);
            next = part.range.end;
            const HaloPlan other = halo_plan(shards, part.peer, halo);
            EXPECT_EQ(std::count(other.sends.begin(), other.sends.end(), RowTransfer{rank, part.range}), 1);
          }
          EXPECT_EQ(next, shard.begin);
          for (const RowTransfer& part : plan.sends) {
            const HaloPlan other = halo_plan(shards, part.peer, halo);
            EXPECT_EQ(std::count(other.receives.begin(), other.receives.end(), RowTransfer{rank, part.range}),
                      1);
          }
        }
      }
    }
  }
}

TEST(HaloPlan, TakesSeveralHopsWhenShardsAreShorterThanTheWindow) {
  const HaloPlan plan = halo_plan(ShardPlan(7 * 128, 7, 128), 6, 300);
  ASSERT_EQ(plan.receives.size(), 3U);
  EXPECT_EQ(plan.receives[0], (RowTransfer{3, {468, 512}}));
  EXPECT_EQ(plan.receives[1], (RowTransfer{4, {512, 640}}));
  EXPECT_EQ(plan.receives[2], (RowTransfer{5, {640, 768}}));
}

// What an MPI count cannot hold goes in parts that cover everything once, in order.
TEST(MessageParts, CoverEveryElementOnce) {
  std::vector<float> data(1001);
  for (const int64_t largest_bytes : {1, 4, 40, 4000, 4004, 1 << 20}) {
    const float* next = data.data();
    for_each_message(
        data.data(), static_cast<int64_t>(data.size()),
        [&](const float* at, int count) {
          ASSERT_EQ(at, next);
          ASSERT_GE(count, 1);
          ASSERT_LE(count * 4, std::max<int64_t>(largest_bytes, 4));
          next = at + count;
        },
        largest_bytes);
    EXPECT_EQ(next, data.data() + data.size());
  }
  // Beyond 2^31 elements nothing overflows; the memory is never touched.
  int64_t covered = 0;
  for_each_message(static_cast<char*>(nullptr), 0, [&](char*, int count) { covered += count; });
  EXPECT_EQ(covered, 0);
  const int64_t huge = (int64_t{5} << 30) + 7;
  auto* address = reinterpret_cast<char*>(uintptr_t{1} << 20);
  for_each_message(address, huge, [&](char* at, int count) {
    EXPECT_EQ(at - address, covered);
    covered += count;
  });
  EXPECT_EQ(covered, huge);
}

}  // namespace
}  // namespace longhalo

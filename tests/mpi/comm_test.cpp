// Exchanges between ranks, with values that tell their owner and position.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>

#include "comm/halo_exchange.hpp"
#include "comm/landmark_gather.hpp"
#include "comm/row_broadcast.hpp"
#include "device/available_memory.hpp"
#include "support/mpi_main.hpp"

namespace longhalo::test {
namespace {

constexpr int64_t kRow = 6;
constexpr float kUnset = -1;

// Below 2^24, so exact in fp32.
float key_value(int64_t token, int64_t element) {
  return static_cast<float>(token * 16 + element);
}
float value_value(int64_t token, int64_t element) {
  return key_value(token, element) + 8;
}

struct Rows {
  int64_t first;
  std::vector<float> k, v;
  Rows(int64_t first, int64_t count)
      : first(first), k(static_cast<size_t>(count * kRow), kUnset), v(k.size(), kUnset) {}
  void fill(TokenRange tokens) {
    for (int64_t token = tokens.begin; token < tokens.end; ++token)
      for (int64_t e = 0; e < kRow; ++e) {
        k[static_cast<size_t>((token - first) * kRow + e)] = key_value(token, e);
        v[static_cast<size_t>((token - first) * kRow + e)] = value_value(token, e);
      }
  }
  void expect_all(TokenRange tokens) const {
    for (int64_t token = tokens.begin; token < tokens.end; ++token)
      for (int64_t e = 0; e < kRow; ++e) {
        ASSERT_EQ(k[static_cast<size_t>((token - first) * kRow + e)], key_value(token, e))
            << "token " << token;
        ASSERT_EQ(v[static_cast<size_t>((token - first) * kRow + e)], value_value(token, e))
            << "token " << token;
      }
  }
  KvRows view() { return {k.data(), v.data(), first}; }
};

TEST(HaloExchange, BringsTheRightRowsIntoPlace) {
  for (const int64_t tokens : {1, 100, 129, 896, 2000}) {
    const ShardPlan shards(tokens, session().ranks(), 128);
    for (const int64_t halo : {1, 100, 300, 4000}) {
      const HaloPlan plan = halo_plan(shards, session().rank(), halo);
      const TokenRange shard = shards.shard(session().rank());
      HaloExchange exchange(session(), plan, kRow);
      for (int repeat = 0; repeat < 2; ++repeat) {  // layer after layer with one exchange
        Rows rows(plan.halo.begin, plan.halo.size() + shard.size());
        rows.fill(shard);
        exchange.start(rows.view());
        exchange.poll();
        exchange.wait();
        rows.expect_all({plan.halo.begin, shard.end});
      }
      EXPECT_EQ(exchange.cost().received_bytes, 2 * 2 * plan.halo.size() * kRow * 4);
      EXPECT_EQ(sum_over_ranks(session(), exchange.cost().sent_bytes),
                sum_over_ranks(session(), exchange.cost().received_bytes));
    }
  }
}

TEST(LandmarkGather, GivesEveryRankAllLandmarks) {
  for (const int64_t tokens : {1, 3, 100, 900, 2000}) {
    for (const int64_t stride : {2, 4, 128, 3000}) {
      const ShardPlan shards(tokens, session().ranks(), shard_alignment(std::vector<int64_t>{stride}));
      LandmarkGather gather(session(), shards, stride, kRow);
      ASSERT_EQ(gather.segments(), tokens / stride);
      Rows rows(0, gather.segments());
      rows.fill(gather.own());
      gather.start(rows.k.data(), rows.v.data());
      gather.poll();
      gather.wait();
      rows.expect_all({0, gather.segments()});
    }
  }
}

TEST(RowBroadcast, PutsTheLastTokensOnEveryRank) {
  for (const int64_t tokens : {1, 128, 900, 2000}) {
    const ShardPlan shards(tokens, session().ranks(), 128);
    for (const int64_t window : {1, 100, 500, 4000}) {
      const TokenRange range{std::max<int64_t>(0, tokens - window), tokens};
      const TokenRange shard = shards.shard(session().rank());
      RowBroadcast broadcast(session(), shards, range, kRow);
      Rows own(shard.begin, shard.size()), all(range.begin, range.size());
      own.fill(shard);
      broadcast.start(own.view(), all.view());
      broadcast.wait();
      all.expect_all(range);
    }
  }
}

TEST(MpiSession, ErrorOfOneRankReachesAllRanks) {
  const int guilty = session().ranks() - 1;
  try {
    session().together([&] {
      if (session().rank() == guilty) throw UserError("the file is damaged", "weights.bin", "copy it again");
    });
    FAIL() << "every rank must see the error";
  } catch (const JointError& error) {
    EXPECT_EQ(error.reporting_rank, guilty);
    EXPECT_EQ(error.exit_code, ExitCode::kUserError);
    EXPECT_NE(std::string(error.what()).find("weights.bin"), std::string::npos);
  }
  EXPECT_NO_THROW(session().together([] {}));
}

TEST(MpiSession, GathersAndBroadcastsTexts) {
  const std::string own(static_cast<size_t>(session().rank()) * 3, 'x');
  const std::vector<std::string> all = gather_text(session(), own);
  if (session().is_root()) {
    ASSERT_EQ(all.size(), static_cast<size_t>(session().ranks()));
    for (size_t rank = 0; rank < all.size(); ++rank)
      EXPECT_EQ(all[rank], std::string(rank * 3, 'x'));
  }
  EXPECT_EQ(broadcast_text(session(), session().is_root() ? "hello" : ""), "hello");
  EXPECT_EQ(session().hosts().size(), static_cast<size_t>(session().ranks()));
  const RankSpread spread = spread_over_ranks(session(), session().rank());
  EXPECT_EQ(spread.min, 0);
  EXPECT_EQ(spread.max, session().ranks() - 1);
  EXPECT_DOUBLE_EQ(spread.mean, (session().ranks() - 1) / 2.0);
}

// Counts of MPI are int. The root's bytes are zeros that take no memory, but for a few marks.
TEST(MpiSession, BroadcastsMoreThanAnIntCounts) {
  if (session().ranks() != 2) GTEST_SKIP() << "two ranks show it; each takes 2 GB";
  constexpr int64_t kBytes = (int64_t{1} << 31) + 12345, kBetweenMarks = (int64_t{1} << 26) + 1;
  if (bits_of_ranks(session(), available_host_bytes() < 2 * kBytes ? 1 : 0) != 0)
    GTEST_SKIP() << "less than 4 GB of memory are left";
  const std::unique_ptr<char, void (*)(void*)> data(
      static_cast<char*>(std::calloc(static_cast<size_t>(kBytes), 1)), &std::free);
  ASSERT_NE(data, nullptr);
  const std::span<char> bytes(data.get(), static_cast<size_t>(kBytes));
  const auto mark = [](int64_t at) { return static_cast<char>(1 + at / kBetweenMarks); };
  if (session().is_root()) {
    for (int64_t at = 0; at < kBytes; at += kBetweenMarks)
      bytes[static_cast<size_t>(at)] = mark(at);
    bytes.back() = 99;
  } else {
    std::memset(bytes.data(), 0xff, bytes.size());
  }
  broadcast_bytes(session(), bytes.data(), kBytes, 0);
  ASSERT_EQ(bytes.back(), 99);
  bytes.back() = 0;
  for (int64_t at = 0; at < kBytes; at += kBetweenMarks) {
    ASSERT_EQ(bytes[static_cast<size_t>(at)], mark(at)) << at;
    bytes[static_cast<size_t>(at)] = 0;
    if (session().is_root()) continue;
    const auto count = static_cast<size_t>(std::min(kBetweenMarks, kBytes - at));
    // All equal to the first, which is zero.
    ASSERT_EQ(std::memcmp(bytes.data() + at, bytes.data() + at + 1, count - 1), 0) << at;
  }
}

// The ranks go separate ways at the second operation; all of them learn which, and go on together.
TEST(Operations, ThatDifferAreNamed) {
  if (session().ranks() == 1) GTEST_SKIP() << "one rank alone does what it does";
  MpiSession checked(session().comm());
  checked.set_check_operations(true);
  EXPECT_EQ(sum_over_ranks(checked, 1), checked.ranks());
  const int odd = checked.ranks() - 1;
  try {
    if (checked.rank() == odd)
      spread_over_ranks(checked, 1);
    else
      sum_over_ranks(checked, 1);
    ADD_FAILURE() << "nothing was compared";
  } catch (const JointError& error) {
    const std::string words = error.what();
    EXPECT_NE(words.find("rank 0 is at operation #2, a sum over ranks, 0 bytes"), std::string::npos) << words;
    EXPECT_NE(words.find("rank " + std::to_string(odd) + " at #2, a spread over ranks, 0 bytes"),
              std::string::npos)
        << words;
    EXPECT_EQ(error.exit_code, ExitCode::kInternalError);
  }
  std::string text(checked.rank() == 0 ? 3 : 4, 'x');
  EXPECT_THROW(broadcast_bytes(checked, text.data(), static_cast<int64_t>(text.size()), 0), JointError)
      << "another size";
  EXPECT_EQ(bits_of_ranks(checked, 1), 1U);
}

}  // namespace
}  // namespace longhalo::test

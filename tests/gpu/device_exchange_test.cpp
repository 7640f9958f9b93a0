// Halo, landmarks and context on the GPU, by every transport that works here: words that tell owner, token
// and place, for windows longer than shards and ranks that own nothing; and what the clock says.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "comm/device_exchange.hpp"
#include "device/device_buffer.hpp"
#include "support/mpi_main.hpp"
#include "transport_fixture.hpp"

namespace longhalo::testing {
namespace {

class DeviceExchangeTest : public TransportTest {};

constexpr int64_t kWords = 7;
constexpr int64_t kRowBytes = kWords * static_cast<int64_t>(sizeof(int64_t));
constexpr int64_t kUnset = -1;
constexpr int64_t kGuardRows = 2;

int64_t word_of(int owner, int64_t token, int64_t word, int layer) {
  return ((static_cast<int64_t>(owner) * 64 + layer) << 40) + token * 16 + word;
}

// Rows of tokens [first, first + count) and a guard around them; on the host, then on the GPU.
class Rows {
 public:
  Rows(int64_t first, int64_t count, cudaStream_t stream)
      : first_(first),
        host_(static_cast<size_t>((count + 2 * kGuardRows) * kWords), kUnset),
        device_(static_cast<int64_t>(host_.size()), "rows", stream),
        stream_(stream) {}

  int64_t* data() { return device_.data() + kGuardRows * kWords; }
  void fill(const ShardPlan& shards, TokenRange tokens, int layer) {
    for (int64_t token = tokens.begin; token < tokens.end; ++token)
      for (int64_t word = 0; word < kWords; ++word)
        host_[static_cast<size_t>((token - first_ + kGuardRows) * kWords + word)] =
            word_of(shards.owner(token), token, word, layer);
  }
  void upload() {
    copy_async(device_.data(), host_.data(), device_.size(), stream_);
    check_cuda(cudaStreamSynchronize(stream_), "uploading");
  }
  void expect_as_filled() {
    std::vector<int64_t> found(host_.size());
    to_host<int64_t>(found, device_.data(), stream_);
    if (found == host_) return;
    const auto at = std::mismatch(found.begin(), found.end(), host_.begin()).first - found.begin();
    FAIL() << "token " << first_ + at / kWords - kGuardRows << ", word " << at % kWords << " is "
           << found[static_cast<size_t>(at)] << ", not " << host_[static_cast<size_t>(at)];
  }

 private:
  int64_t first_;
  std::vector<int64_t> host_;
  DeviceBuffer<int64_t> device_;
  cudaStream_t stream_;
};

TEST_P(DeviceExchangeTest, BringsTheHaloIntoPlaceLayerAfterLayer) {
  const int me = transport().rank();
  for (const int64_t tokens : {1, 100, 129, 896, 2000}) {
    const ShardPlan shards(tokens, transport().ranks(), 128);
    for (const int64_t halo : {1, 100, 300, 4000}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, halo " << halo);
      const HaloPlan plan = halo_plan(shards, me, halo);
      const TokenRange shard = shards.shard(me);
      const int64_t halo_rows = plan.halo.size();
      DeviceHaloExchange exchange(transport(), plan, kRowBytes);
      for (int layer = 0; layer < 3; ++layer) {
        Rows rows(plan.halo.begin, halo_rows + shard.size(), stream());
        rows.fill(shards, shard, layer);
        rows.upload();
        exchange.start(rows.data(), plan.halo.begin, stream(), device().communication());
        exchange.make_wait(stream());
        rows.fill(shards, {plan.halo.begin, shard.end}, layer);
        rows.expect_as_filled();
      }
      EXPECT_EQ(exchange.cost().received_bytes, 3 * halo_rows * kRowBytes);
      EXPECT_EQ(sum_over_ranks(test::session(), exchange.cost().sent_bytes),
                sum_over_ranks(test::session(), exchange.cost().received_bytes));
    }
  }
  transport().check_health();
}

// All layers queued at once on one buffer, as a prefill does: each writes its shard after the layer before it
// has read its halo.
TEST_P(DeviceExchangeTest, KeepsLayersApartThatAreQueuedAtOnce) {
  constexpr int kLayers = 30;
  constexpr int64_t kTokens = 3000, kHalo = 1500;
  const int me = transport().rank();
  const ShardPlan shards(kTokens, transport().ranks(), 128);
  const HaloPlan plan = halo_plan(shards, me, kHalo);
  const TokenRange shard = shards.shard(me);
  const int64_t halo_words = plan.halo.size() * kWords, own_words = shard.size() * kWords;
  std::vector<int64_t> own_values, halo_values;
  const auto append = [&](std::vector<int64_t>& values, TokenRange tokens, int layer) {
    for (int64_t token = tokens.begin; token < tokens.end; ++token)
      for (int64_t word = 0; word < kWords; ++word)
        values.push_back(word_of(shards.owner(token), token, word, layer));
  };
  for (int layer = 0; layer < kLayers; ++layer) {
    append(own_values, shard, layer);
    append(halo_values, plan.halo, layer);
  }
  const DeviceBuffer<int64_t> values = to_device<int64_t>(own_values, "values of all layers", stream());
  DeviceBuffer<int64_t> seen(std::max<int64_t>(1, kLayers * halo_words), "halos of all layers", stream());
  DeviceBuffer<int64_t> rows(halo_words + own_words, "rows", stream());
  DeviceHaloExchange exchange(transport(), plan, kRowBytes, Timing::kOn);
  for (int layer = 0; layer < kLayers; ++layer) {
    copy_async(rows.data() + halo_words, values.data() + layer * own_words, own_words, stream());
    exchange.start(rows.data(), plan.halo.begin, stream(), device().communication());
    exchange.make_wait(stream());
    if (halo_words > 0) copy_async(seen.data() + layer * halo_words, rows.data(), halo_words, stream());
  }
  device().synchronize();
  std::vector<int64_t> found(halo_values.size());
  to_host<int64_t>(found, seen.data(), stream());
  EXPECT_TRUE(found == halo_values);
  const CommCost cost = exchange.cost();
  EXPECT_GT(cost.transfer_seconds, 0);
  EXPECT_GE(cost.exposed_seconds, 0);
  EXPECT_EQ(exchange.cost().transfer_seconds, cost.transfer_seconds) << "asking again adds nothing";
  transport().check_health();
}

TEST_P(DeviceExchangeTest, GivesEveryRankAllLandmarks) {
  for (const int64_t tokens : {1, 3, 100, 900, 2000}) {
    for (const int64_t stride : {2, 4, 128, 3000}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, stride " << stride);
      const ShardPlan shards(tokens, transport().ranks(), shard_alignment(std::vector<int64_t>{stride}));
      DeviceLandmarkGather gather(transport(), shards, stride, kRowBytes);
      ASSERT_EQ(gather.segments(), tokens / stride);
      Rows rows(0, gather.segments(), stream());
      const TokenRange own = gather.own();
      if (!own.empty()) rows.fill(shards, own, 1);
      rows.upload();
      gather.start(rows.data(), stream(), device().communication());
      gather.make_wait(stream());
      rows.fill(shards, {0, gather.segments()}, 1);
      rows.expect_as_filled();
      EXPECT_EQ(gather.cost().received_bytes,
                (gather.segments() - (own.empty() ? 0 : own.size())) * kRowBytes);
    }
  }
}

TEST_P(DeviceExchangeTest, PutsTheLastTokensOnEveryRank) {
  for (const int64_t tokens : {1, 128, 900, 2000}) {
    const ShardPlan shards(tokens, transport().ranks(), 128);
    for (const int64_t window : {1, 100, 500, 4000}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, window " << window);
      const TokenRange range{std::max<int64_t>(0, tokens - window), tokens};
      const TokenRange shard = shards.shard(transport().rank());
      DeviceRowBroadcast broadcast(transport(), shards, range, kRowBytes);
      Rows own(shard.begin, shard.size(), stream()), all(range.begin, range.size(), stream());
      own.fill(shards, shard, 2);
      own.upload();
      all.upload();
      broadcast.start(own.data(), shard.begin, all.data(), stream(), device().communication());
      broadcast.make_wait(stream());
      all.fill(shards, range, 2);
      all.expect_as_filled();
      own.expect_as_filled();
    }
  }
}

// A transfer that ended long before compute asks for it costs nothing; where the owner of a halo comes late,
// compute stands still for as long.
TEST_P(DeviceExchangeTest, TellsHiddenFromExposedTransfers) {
  if (transport().ranks() == 1) GTEST_SKIP() << "one rank moves nothing";
  if (transport().kind() == TransportChoice::kMpi) GTEST_SKIP() << "mpi hides nothing: the host waits";
  constexpr int64_t kTokens = 60'000, kSlowBytes = int64_t{256} << 20;
  const ShardPlan shards(kTokens, transport().ranks(), 128);
  const int me = transport().rank();
  const HaloPlan plan = halo_plan(shards, me, 1000);  // from the rank to the left alone
  DeviceBuffer<uint8_t> rows((plan.halo.size() + shards.shard(me).size()) * kRowBytes, "rows", stream());
  DeviceBuffer<uint8_t> slow(kSlowBytes, "slow", stream()), slower(kSlowBytes, "slower", stream());
  const auto be_busy = [&] {
    for (int i = 0; i < 200; ++i)  // tens of milliseconds
      copy_async(slower.data(), slow.data(), kSlowBytes, stream());
  };
  const auto turn = [&](bool rank_0_is_late, bool busy_meanwhile) {
    DeviceHaloExchange exchange(transport(), plan, kRowBytes, Timing::kOn);
    device().synchronize();
    check_mpi(MPI_Barrier(test::session().comm()), "MPI_Barrier");
    if (rank_0_is_late && me == 0) be_busy();
    exchange.start(rows.data(), plan.halo.begin, stream(), device().communication());
    if (busy_meanwhile) be_busy();
    exchange.make_wait(stream());
    device().synchronize();
    return exchange.cost();
  };
  turn(false, false);  // connections and clocks warm up
  const CommCost hidden = turn(false, true), exposed = turn(true, false);
  EXPECT_GT(hidden.transfer_seconds, 0);
  EXPECT_EQ(hidden.exposed_seconds, 0);
  if (me != 1) return;
  Event before(Timing::kOn),
      after(Timing::kOn);  // how long that is, with the other ranks idle, as it was then
  before.record(stream());
  be_busy();
  after.record(stream());
  device().synchronize();
  EXPECT_GT(exposed.exposed_seconds, 0.3 * seconds_between(before, after));
  EXPECT_LT(exposed.exposed_seconds, exposed.transfer_seconds + 1e-3) << "clocks of two streams";
}

TEST_P(DeviceExchangeTest, StartsAndWaitsInTurn) {
  const ShardPlan shards(256, transport().ranks(), 128);
  const HaloPlan plan = halo_plan(shards, transport().rank(), 10);
  DeviceHaloExchange exchange(transport(), plan, kRowBytes);
  Rows rows(plan.halo.begin, plan.halo.size() + shards.shard(transport().rank()).size(), stream());
  EXPECT_THROW(exchange.make_wait(stream()), InvariantError);
  exchange.start(rows.data(), plan.halo.begin, stream(), device().communication());
  EXPECT_THROW(exchange.start(rows.data(), plan.halo.begin, stream(), device().communication()),
               InvariantError);
  exchange.make_wait(stream());
  device().synchronize();
}

LONGHALO_EACH_TRANSPORT(DeviceExchangeTest);

}  // namespace
}  // namespace longhalo::testing

// Device memory between ranks, by every transport that works here: bytes that tell their sender, receiver and
// place; guard zones; and the order of streams. Ranks take the GPUs in turn, so two may share one.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "comm/device_choice.hpp"
#include "comm/transport.hpp"
#include "device/device_buffer.hpp"
#include "device/pinned_buffer.hpp"
#include "support/mpi_main.hpp"
#include "transport_fixture.hpp"

namespace longhalo::testing {
namespace {

constexpr uint8_t kPoison = 0xee;
constexpr int64_t kGuard = 253;  // odd, so that messages lie at odd addresses

struct Tag {
  int sender, receiver, message;
};

uint8_t byte_of(const Tag& tag, int64_t offset) {
  const auto mixed =
      static_cast<uint64_t>(offset) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(tag.sender) * 0x51u +
      static_cast<uint64_t>(tag.receiver) * 0x2f0fu + static_cast<uint64_t>(tag.message) * 0x83a1u;
  return static_cast<uint8_t>((mixed >> 32) ^ mixed);
}

// Messages one after the other in one array, a guard zone around each.
class Mailbox {
 public:
  Mailbox(std::span<const int64_t> sizes, cudaStream_t stream) : stream_(stream) {
    int64_t at = kGuard;
    for (const int64_t size : sizes) {
      places_.push_back({at, size});
      at += size + kGuard;
    }
    host_.assign(static_cast<size_t>(at), kPoison);
    device_ = DeviceBuffer<uint8_t>(at, "messages", stream);
  }
  uint8_t* device(size_t i) { return device_.data() + places_[i].offset; }
  int64_t size(size_t i) const { return places_[i].bytes; }
  void fill(size_t i, const Tag& tag) {
    for (int64_t j = 0; j < size(i); ++j)
      host_[static_cast<size_t>(places_[i].offset + j)] = byte_of(tag, j);
  }
  void upload() {
    copy_async(device_.data(), host_.data(), device_.size(), stream_);
    check_cuda(cudaStreamSynchronize(stream_), "uploading");
  }
  // What the array holds must be what the host holds: the messages expected, and guards.
  void expect_as_filled() {
    std::vector<uint8_t> found(host_.size());
    to_host<uint8_t>(found, device_.data(), stream_);
    if (found == host_) return;
    const auto at = std::mismatch(found.begin(), found.end(), host_.begin()).first - found.begin();
    size_t i = 0;
    while (i < places_.size() && places_[i].offset + places_[i].bytes + kGuard <= at)
      ++i;
    FAIL() << "byte " << at - places_[i].offset << " of message " << i << " with " << places_[i].bytes
           << " bytes is " << int{found[static_cast<size_t>(at)]} << ", not "
           << int{host_[static_cast<size_t>(at)]};
  }

 private:
  cudaStream_t stream_;
  std::vector<ByteRange> places_;
  std::vector<uint8_t> host_;
  DeviceBuffer<uint8_t> device_;
};

// Every rank sends messages of sizes(sender, receiver) to every rank, itself included, in one exchange.
void exchange_all(Transport& transport, cudaStream_t stream,
                  const std::function<std::vector<int64_t>(int sender, int receiver)>& sizes) {
  const int me = transport.rank();
  std::vector<int64_t> out_sizes, in_sizes;
  std::vector<Tag> out_tags, in_tags;
  for (int peer = 0; peer < transport.ranks(); ++peer) {
    int message = 0;
    for (const int64_t size : sizes(me, peer)) {
      out_sizes.push_back(size);
      out_tags.push_back({me, peer, message++});
    }
    message = 0;
    for (const int64_t size : sizes(peer, me)) {
      in_sizes.push_back(size);
      in_tags.push_back({peer, me, message++});
    }
  }
  Mailbox out(out_sizes, stream), in(in_sizes, stream);
  for (size_t i = 0; i < out_tags.size(); ++i)
    out.fill(i, out_tags[i]);
  out.upload();
  in.upload();  // poison
  std::vector<DeviceMessage> sends, receives;
  for (size_t i = 0; i < out_tags.size(); ++i)
    sends.push_back({out_tags[i].receiver, out.device(i), out.size(i)});
  for (size_t i = 0; i < in_tags.size(); ++i)
    receives.push_back({in_tags[i].sender, in.device(i), in.size(i)});
  // Only the order of messages between one pair counts: whole messages of different peers may be mixed.
  std::stable_sort(receives.begin(), receives.end(),
                   [](const auto& a, const auto& b) { return a.peer > b.peer; });
  transport.exchange(sends, receives, stream);
  for (size_t i = 0; i < in_tags.size(); ++i)
    in.fill(i, in_tags[i]);
  in.expect_as_filled();
  out.expect_as_filled();
  transport.check_health();
}

TEST_P(TransportTest, BringsEveryMessageOfEverySizeToItsPlace) {
  for (const int64_t size : {0, 1, 3, 255, 4096, 65537, 1'000'003}) {
    SCOPED_TRACE(size);
    exchange_all(transport(), stream(), [&](int, int) { return std::vector<int64_t>{size}; });
  }
}

TEST_P(TransportTest, BringsAHundredMegabytesFromUnequalRanks) {
  const int ranks = transport().ranks();
  exchange_all(transport(), stream(), [&](int sender, int receiver) {
    if (receiver != (sender + 1) % ranks) return std::vector<int64_t>{};
    return std::vector<int64_t>{(int64_t{100} << 20) / (1 + sender) + 5, 17};
  });
}

TEST_P(TransportTest, KeepsTheOrderOfManyMessagesOfOnePair) {
  for (unsigned round = 0; round < 4; ++round)
    exchange_all(transport(), stream(), [&](int sender, int receiver) {
      std::mt19937 random(round * 10007u + static_cast<unsigned>(sender * 64 + receiver));
      std::vector<int64_t> sizes(static_cast<size_t>(random() % 60));
      for (int64_t& size : sizes)
        size = random() % 5 == 0 ? 0 : static_cast<int64_t>(random() % 20000);
      return sizes;
    });
}

TEST_P(TransportTest, CountsWhatTravels) {
  const int ranks = transport().ranks();
  const int64_t sent = transport().sent_bytes(), received = transport().received_bytes();
  exchange_all(transport(), stream(), [](int sender, int) { return std::vector<int64_t>{100 + sender}; });
  EXPECT_EQ(transport().sent_bytes() - sent, (ranks - 1) * (100 + transport().rank()));
  EXPECT_EQ(transport().received_bytes() - received,
            (ranks - 1) * 100 + ranks * (ranks - 1) / 2 - transport().rank());
}

// Fifty rounds without a pause, each of which: writes the message late (after slow copies), sends it by
// another stream, changes it at once when that stream is past, and reads what came on the first stream.
TEST_P(TransportTest, MovesWhatTheStreamsOrderSays) {
  constexpr int kRounds = 50;
  constexpr int64_t kBytes = 300'007, kSlowBytes = int64_t{64} << 20;
  const int ranks = transport().ranks(), me = transport().rank();
  const int right = (me + 1) % ranks, left = (me + ranks - 1) % ranks;
  cudaStream_t compute = stream(), communication = device().communication();
  DeviceBuffer<uint8_t> out(kBytes, "out", compute), in(kBytes, "in", compute);
  DeviceBuffer<uint8_t> slow(kSlowBytes, "slow", compute), slower(kSlowBytes, "slower", compute);
  PinnedBuffer<uint8_t> seen(kRounds * kBytes, "what came");
  Event ready, arrived;
  const auto value = [](int sender, int round) {
    return static_cast<uint8_t>(1 + (sender * 61 + round * 3) % 250);
  };
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < (me * 7 + round * 5) % 11; ++i)  // other delays on other ranks
      copy_async(slower.data(), slow.data(), kSlowBytes, compute);
    check_cuda(cudaMemsetAsync(in.data(), kPoison, kBytes, compute), "cudaMemsetAsync");
    check_cuda(cudaMemsetAsync(out.data(), value(me, round), kBytes, compute), "cudaMemsetAsync");
    ready.record(compute);
    ready.make_wait(communication);
    const DeviceMessage send{right, out.data(), kBytes}, receive{left, in.data(), kBytes};
    transport().exchange({&send, 1}, {&receive, 1}, communication);
    check_cuda(cudaMemsetAsync(out.data(), kPoison, kBytes, communication), "cudaMemsetAsync");
    arrived.record(communication);
    arrived.make_wait(compute);
    copy_async(seen.data() + round * kBytes, in.data(), kBytes, compute);
  }
  device().synchronize();
  for (int round = 0; round < kRounds; ++round)
    for (int64_t i = 0; i < kBytes; ++i)
      ASSERT_EQ(seen[round * kBytes + i], value(left, round)) << "round " << round << ", byte " << i;
  transport().check_health();
}

// Queueing must not wait for the data: here it cannot come until the host has gone on.
TEST_P(TransportTest, DoesNotMakeTheHostWait) {
  if (transport().kind() == TransportChoice::kMpi) GTEST_SKIP() << "mpi makes the host wait, and says so";
  constexpr int64_t kBytes = 70'001;
  const int ranks = transport().ranks(), me = transport().rank();
  DeviceBuffer<uint8_t> out(kBytes, "out", stream()), in(kBytes, "in", stream());
  std::atomic<bool> host_went_on{false};
  check_cuda(cudaMemsetAsync(out.data(), me + 1, kBytes, stream()), "cudaMemsetAsync");
  check_cuda(cudaLaunchHostFunc(
                 stream(),
                 [](void* flag) {
                   while (!static_cast<std::atomic<bool>*>(flag)->load())
                     std::this_thread::yield();
                 },
                 &host_went_on),
             "cudaLaunchHostFunc");
  const DeviceMessage send{(me + 1) % ranks, out.data(), kBytes};
  const DeviceMessage receive{(me + ranks - 1) % ranks, in.data(), kBytes};
  transport().exchange({&send, 1}, {&receive, 1}, stream());
  host_went_on.store(true);
  std::vector<uint8_t> seen(kBytes);
  to_host<uint8_t>(seen, in.data(), stream());
  EXPECT_EQ(seen, std::vector<uint8_t>(kBytes, static_cast<uint8_t>((me + ranks - 1) % ranks + 1)));
}

TEST_P(TransportTest, GathersPartsOfAnySize) {
  const int ranks = transport().ranks(), me = transport().rank();
  const std::vector<std::function<int64_t(int)>> sizes{
      [](int) { return 1000; },                            // equal
      [](int r) { return r == 0 ? 12'345 : 0; },           // one rank has all
      [](int r) { return r % 2 == 0 ? 0 : 4097; },         //
      [](int r) { return 777 + 1'000'000 * int64_t{r}; },  //
      [](int r) { return (int64_t{21} << 20) - 11 * r; },  // several chunks
      [](int) { return 0; },
  };
  for (size_t which = 0; which < sizes.size(); ++which)
    for (const int64_t gap : {int64_t{0}, kGuard}) {
      SCOPED_TRACE(::testing::Message() << "sizes " << which << ", gap " << gap);
      std::vector<ByteRange> parts;
      int64_t at = kGuard;
      for (int r = 0; r < ranks; ++r) {
        parts.push_back({at, sizes[which](r)});
        at += parts.back().bytes + gap;
      }
      at += kGuard;
      std::vector<uint8_t> own(static_cast<size_t>(at), kPoison), all(own), seen(own.size());
      for (int r = 0; r < ranks; ++r) {
        const ByteRange& part = parts[static_cast<size_t>(r)];
        for (int64_t i = 0; i < part.bytes; ++i) {
          all[static_cast<size_t>(part.offset + i)] = byte_of({r, 0, static_cast<int>(which)}, i);
          if (r == me) own[static_cast<size_t>(part.offset + i)] = all[static_cast<size_t>(part.offset + i)];
        }
      }
      DeviceBuffer<uint8_t> data = to_device<uint8_t>(own, "parts", stream());
      transport().all_gather(data.data(), parts, stream());
      to_host<uint8_t>(seen, data.data(), stream());
      ASSERT_TRUE(seen == all);
    }
}

TEST_P(TransportTest, BroadcastsFromEveryRank) {
  for (int root = 0; root < transport().ranks(); ++root)
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{4097}, (int64_t{20} << 20) + 3}) {
      std::vector<uint8_t> expected(static_cast<size_t>(bytes + 2 * kGuard), kPoison), seen(expected.size());
      const std::vector<uint8_t> poison = expected;
      for (int64_t i = 0; i < bytes; ++i)
        expected[static_cast<size_t>(kGuard + i)] = byte_of({root, 1, 2}, i);
      DeviceBuffer<uint8_t> data =
          to_device<uint8_t>(transport().rank() == root ? expected : poison, "a broadcast", stream());
      transport().broadcast(data.data() + kGuard, bytes, root, stream());
      to_host<uint8_t>(seen, data.data(), stream());
      ASSERT_TRUE(seen == expected) << "root " << root << ", " << bytes << " bytes";
    }
}

TEST_P(TransportTest, IsMadeAndEndedManyTimes) {
  for (int round = 0; round < 3; ++round) {
    const ChosenTransport again = make_transport(test::session(), GetParam(), device().info());
    exchange_all(*again.transport, stream(), [](int, int) { return std::vector<int64_t>{1000}; });
  }
}

TEST_P(TransportTest, RefusesMessagesThatCannotBe) {
  DeviceBuffer<uint8_t> data(8, "data", stream());
  const DeviceMessage stranger{transport().ranks(), data.data(), 8}, negative{0, data.data(), -1};
  EXPECT_THROW(transport().exchange({&stranger, 1}, {}, stream()), InvariantError);
  EXPECT_THROW(transport().exchange({}, {&negative, 1}, stream()), InvariantError);
  EXPECT_THROW(transport().broadcast(data.data(), 8, -1, stream()), InvariantError);
  const std::vector<ByteRange> too_many(static_cast<size_t>(transport().ranks()) + 1);
  EXPECT_THROW(transport().all_gather(data.data(), too_many, stream()), InvariantError);
}

// The sender's message is longer than the receiver's place: MPI's error must come out on the main thread.
TEST_F(RankTest, AFailureOnTheHostIsKeptForTheMainThread) {
  if (test::session().ranks() == 1) GTEST_SKIP() << "one rank sends nothing";
  const ChosenTransport staged = make_transport(test::session(), TransportChoice::kStaged, device().info());
  DeviceBuffer<uint8_t> data(200, "data", stream());
  const DeviceMessage send{1, data.data(), 200}, receive{0, data.data(), 100};
  if (test::session().rank() == 0) staged.transport->exchange({&send, 1}, {}, stream());
  if (test::session().rank() == 1) staged.transport->exchange({}, {&receive, 1}, stream());
  device().synchronize();
  if (test::session().rank() != 1) return staged.transport->check_health();
  try {
    staged.transport->check_health();
    FAIL() << "a truncated message went unnoticed";
  } catch (const InvariantError& error) {
    EXPECT_NE(std::string(error.what()).find("an exchange through the host failed: MPI_ERR"),
              std::string::npos)
        << error.what();
  }
}

TEST_F(RankTest, AutoChoosesAlikeAndSaysWhy) {
  const ChosenTransport chosen = make_transport(test::session(), TransportChoice::kAuto, device().info());
  if (test::session().is_root()) std::printf("auto: %s\n", chosen.reason.c_str());
  const auto kind = static_cast<double>(chosen.transport->kind());
  const RankSpread kinds = spread_over_ranks(test::session(), kind);
  EXPECT_EQ(kinds.min, kinds.max);
  EXPECT_NE(chosen.reason.find(chosen.transport->name()), std::string::npos) << chosen.reason;
  const bool shared = test::session().local_ranks() > visible_devices();
  if (shared) {
    EXPECT_NE(chosen.transport->kind(), TransportChoice::kNccl);
    EXPECT_NE(chosen.reason.find("share a GPU"), std::string::npos) << chosen.reason;
  }
}

TEST_F(RankTest, WhatCannotBeIsRefusedOnEveryRankWithReasonAndRemedy) {
  for (const TransportChoice wanted : {TransportChoice::kNccl, TransportChoice::kMpi}) {
    int refused = 0;
    try {
      const ChosenTransport made = make_transport(test::session(), wanted, device().info());
      EXPECT_EQ(made.transport->kind(), wanted);
    } catch (const UserError& error) {
      refused = 1;
      const std::string words = error.what();
      EXPECT_NE(words.find(name_of(wanted)), std::string::npos) << words;
      EXPECT_NE(words.find("run.transport: auto"), std::string::npos) << words;
      if (test::session().is_root()) std::printf("%s\n", words.c_str());
    }
    const int64_t all = sum_over_ranks(test::session(), refused);
    EXPECT_TRUE(all == 0 || all == test::session().ranks());
  }
}

TEST_F(RankTest, GpusGoToRanksInTurn) {
  const int visible = visible_devices();
  EXPECT_EQ(choose_device(test::session(), ShareGpus::kYes), test::session().local_rank() % visible);
  if (test::session().local_ranks() > visible)
    EXPECT_THROW(choose_device(test::session(), ShareGpus::kNo), JointError);
  else
    EXPECT_EQ(choose_device(test::session(), ShareGpus::kNo), test::session().local_rank());
}

LONGHALO_EACH_TRANSPORT(TransportTest);

}  // namespace
}  // namespace longhalo::testing

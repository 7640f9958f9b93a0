// Which transport and which GPU a rank takes: pure rules, tried against tables of what a machine may offer.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "comm/device_choice.hpp"
#include "comm/transport_choice.hpp"
#include "core/error.hpp"

namespace longhalo {
namespace {

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const UserError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

bool says(const std::string& message, std::string_view part) {
  return message.find(part) != std::string::npos;
}

TEST(TransportChoice, AutoTakesTheFirstThatWorksAndNamesWhatSpokeAgainstTheOthers) {
  for (const bool nccl : {false, true})
    for (const bool mpi : {false, true})
      for (const bool staged : {false, true}) {
        const TransportObjections objections{nccl ? "" : "two ranks share a GPU",
                                             mpi ? "" : "MPI knows no GPUs", staged ? "" : "no threads"};
        const auto choose = [&] { return choose_transport(TransportChoice::kAuto, objections); };
        if (!nccl && !mpi && !staged) {
          const std::string message = message_of(choose);
          for (const auto* part :
               {"nccl: two ranks share a GPU", "mpi: MPI knows no GPUs", "staged: no threads"})
            EXPECT_TRUE(says(message, part)) << message;
          continue;
        }
        const TransportChoice chosen = choose();
        EXPECT_EQ(chosen, nccl  ? TransportChoice::kNccl
                          : mpi ? TransportChoice::kMpi
                                : TransportChoice::kStaged);
        const std::string reason = transport_reason(TransportChoice::kAuto, chosen, objections);
        EXPECT_TRUE(says(reason, std::string("transport ") + std::string(name_of(chosen)))) << reason;
        EXPECT_EQ(says(reason, "two ranks share a GPU"), !nccl) << reason;
        EXPECT_EQ(says(reason, "MPI knows no GPUs"), !nccl && !mpi) << reason;
        EXPECT_FALSE(says(reason, "no threads")) << reason;
      }
}

TEST(TransportChoice, WhatIsAskedForIsTakenOrRefusedButNeverReplaced) {
  const TransportObjections none;
  for (const TransportChoice kind :
       {TransportChoice::kNccl, TransportChoice::kMpi, TransportChoice::kStaged}) {
    EXPECT_EQ(choose_transport(kind, none), kind);
    EXPECT_TRUE(says(transport_reason(kind, kind, none), name_of(kind)));
    TransportObjections objections;
    objections.of(kind) = "the cable is out";
    const std::string message = message_of([&] { choose_transport(kind, objections); });
    EXPECT_TRUE(says(message, name_of(kind))) << message;
    EXPECT_TRUE(says(message, "the cable is out")) << message;
    EXPECT_TRUE(says(message, "run.transport: auto")) << message;
  }
}

TEST(DeviceChoice, RanksOfANodeTakeDifferentGpusWhileThereAreEnough) {
  for (int visible = 1; visible <= 8; ++visible)
    for (int local_ranks = 1; local_ranks <= 8; ++local_ranks)
      for (const ShareGpus share : {ShareGpus::kNo, ShareGpus::kYes}) {
        std::vector<int> users(static_cast<size_t>(visible), 0);
        for (int local_rank = 0; local_rank < local_ranks; ++local_rank) {
          const NodeGpus node{"node17", local_rank, local_ranks, visible, false};
          if (local_ranks > visible && share == ShareGpus::kNo) {
            const std::string message = message_of([&] { device_index(node, share); });
            for (const std::string& part : {std::string("node17"), std::to_string(local_ranks) + " ranks",
                                            std::to_string(visible) + " GPU", std::string("run.share_gpus")})
              EXPECT_TRUE(says(message, part)) << message;
            continue;
          }
          const int index = device_index(node, share);
          ASSERT_GE(index, 0);
          ASSERT_LT(index, visible);
          ++users[static_cast<size_t>(index)];
        }
        const auto [fewest, most] = std::minmax_element(users.begin(), users.end());
        EXPECT_LE(*most - *fewest, 1) << local_ranks << " ranks on " << visible << " GPUs";
      }
}

TEST(DeviceChoice, ALauncherThatBindsOneGpuToEachRankIsFollowed) {
  for (int local_rank = 0; local_rank < 4; ++local_rank)
    EXPECT_EQ(device_index({"node17", local_rank, 4, 1, true}, ShareGpus::kNo), 0);
}

TEST(DeviceChoice, NoGpuIsAnErrorWithItsHostEvenWhereSharingIsAllowed) {
  const std::string message = message_of([] { device_index({"node17", 0, 1, 0, false}, ShareGpus::kYes); });
  EXPECT_TRUE(says(message, "node17")) << message;
  EXPECT_TRUE(says(message, "run.device: cpu")) << message;
}

}  // namespace
}  // namespace longhalo

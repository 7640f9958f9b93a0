#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>
#include <vector>

#include "comm/device_choice.hpp"

#include "core/waiting.hpp"
#include "device/device.hpp"

namespace longhalo {
namespace {

// What a rank tells the others; of fixed size, so that one all-gather carries it.
struct Sight {
  char host[MPI_MAX_PROCESSOR_NAME] = {};
  char first_gpu[64] = {};  // UUID
  int visible = 0;
};

std::vector<Sight> sights_of_all(const MpiSession& session) {
  Sight own;
  session.host().copy(own.host, sizeof own.host - 1);
  own.visible = visible_devices();
  if (own.visible > 0) device_info(0).uuid.copy(own.first_gpu, sizeof own.first_gpu - 1);
  std::vector<Sight> all(static_cast<size_t>(session.ranks()));
  const Waiting waiting("the GPUs of all ranks");
  check_mpi(MPI_Allgather(&own, sizeof own, MPI_BYTE, all.data(), sizeof own, MPI_BYTE, session.comm()),
            "MPI_Allgather");
  return all;
}

}  // namespace

int choose_device(const MpiSession& session, ShareGpus share) {
  NodeGpus node{session.host(), session.local_rank(), session.local_ranks(), visible_devices(), false};
  std::set<std::string_view> gpus;
  bool one_each = true;
  const std::vector<Sight> all = sights_of_all(session);
  for (const Sight& sight : all) {
    if (session.host() != sight.host) continue;
    one_each = one_each && sight.visible == 1;
    gpus.insert(sight.first_gpu);
  }
  node.bound = one_each && static_cast<int>(gpus.size()) == node.local_ranks;
  int index = 0;
  session.together([&] { index = device_index(node, share); });
  return index;
}

int ranks_on_card(const MpiSession& session, const std::string& uuid) {
  constexpr size_t kLength = sizeof Sight::first_gpu;
  std::vector<char> all(kLength * static_cast<size_t>(session.ranks()));
  char own[kLength] = {};
  uuid.copy(own, kLength - 1);
  const Waiting waiting("the GPUs of all ranks");
  check_mpi(MPI_Allgather(own, kLength, MPI_CHAR, all.data(), kLength, MPI_CHAR, session.comm()),
            "MPI_Allgather");
  int sharing = 0;
  for (size_t at = 0; at < all.size(); at += kLength)
    sharing += std::memcmp(own, all.data() + at, kLength) == 0 ? 1 : 0;
  return sharing;
}

}  // namespace longhalo

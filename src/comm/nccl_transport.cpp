// Messages between GPUs by NCCL, which finds NVLink, PCIe or GPUDirect RDMA itself. A group of sends and
// receives is one kernel on the stream.
#include <cstring>
#include <vector>

#include "comm/nccl_communicator.hpp"
#include "comm/transport_attempt.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"

namespace longhalo {
namespace {

class NcclTransport final : public Transport {
 public:
  NcclTransport(const MpiSession& session, const ncclUniqueId& id)
      : rank_(session.rank()), ranks_(session.ranks()), communicator_(session, id) {}

  TransportChoice kind() const override { return TransportChoice::kNccl; }
  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }
  void check_health() override { communicator_.check_health(); }
  void abandon() noexcept override { communicator_.abandon(); }

  void exchange(std::span<const DeviceMessage> sends, std::span<const DeviceMessage> receives,
                StreamHandle stream) override;
  void all_gather(void* data, std::span<const ByteRange> parts, StreamHandle stream) override;
  void broadcast(void* data, int64_t bytes, int root, StreamHandle stream) override;

 private:
  // Runs the calls of `queue`, each of which returns an ncclResult_t through `take`, as one group.
  template <class Queue>
  void group(const char* what, const Queue& queue);

  int rank_, ranks_;
  NcclCommunicator communicator_;
  HealthCheck health_{[this] { return communicator_.fault(); }};
};

template <class Queue>
void NcclTransport::group(const char* what, const Queue& queue) {
  communicator_.run(what, [&] {
    // A group that was begun is ended, whatever happens in it.
    ncclResult_t first = ncclGroupStart();
    if (first != ncclSuccess) return first;
    queue([&](ncclResult_t result) {
      if (first == ncclSuccess && result != ncclInProgress) first = result;
    });
    const ncclResult_t ended = ncclGroupEnd();
    return first == ncclSuccess ? ended : first;
  });
}

void NcclTransport::exchange(std::span<const DeviceMessage> sends, std::span<const DeviceMessage> receives,
                             StreamHandle stream) {
  begin_exchange(sends, receives, stream);
  bool any = false;
  for (const auto& messages : {sends, receives})
    for (const DeviceMessage& message : messages)
      any = any || travels(message);
  if (!any) return;
  group("an exchange between the GPUs", [&](const auto& take) {
    for (const DeviceMessage& message : sends)
      if (travels(message))
        take(ncclSend(message.data, static_cast<size_t>(message.bytes), ncclUint8, message.peer,
                      communicator_.get(), stream));
    for (const DeviceMessage& message : receives)
      if (travels(message))
        take(ncclRecv(message.data, static_cast<size_t>(message.bytes), ncclUint8, message.peer,
                      communicator_.get(), stream));
  });
}

void NcclTransport::all_gather(void* data, std::span<const ByteRange> parts, StreamHandle stream) {
  begin_all_gather(parts);
  if (ranks_ == 1) return;
  const ByteRange& first = parts.front();
  bool even = first.bytes > 0, any = false;
  for (int r = 0; r < ranks_; ++r) {
    const ByteRange& part = parts[static_cast<size_t>(r)];
    even = even && part == ByteRange{first.offset + r * first.bytes, first.bytes};
    any = any || part.bytes > 0;
  }
  if (!any) return;
  auto* const bytes = static_cast<uint8_t*>(data);
  if (even) {
    uint8_t* const all = bytes + first.offset;
    communicator_.run("an all-gather between the GPUs", [&] {
      return ncclAllGather(all + rank_ * first.bytes, all, static_cast<size_t>(first.bytes), ncclUint8,
                           communicator_.get(), stream);
    });
    return;
  }
  group("an all-gather between the GPUs", [&](const auto& take) {
    for (int root = 0; root < ranks_; ++root) {
      const ByteRange& part = parts[static_cast<size_t>(root)];
      if (part.bytes > 0)
        take(ncclBroadcast(bytes + part.offset, bytes + part.offset, static_cast<size_t>(part.bytes),
                           ncclUint8, root, communicator_.get(), stream));
    }
  });
}

void NcclTransport::broadcast(void* data, int64_t bytes, int root, StreamHandle stream) {
  begin_broadcast(bytes, root);
  if (ranks_ == 1 || bytes == 0) return;
  communicator_.run("a broadcast between the GPUs", [&] {
    return ncclBroadcast(data, data, static_cast<size_t>(bytes), ncclUint8, root, communicator_.get(),
                         stream);
  });
}

// NCCL refuses two ranks on one GPU with words that do not say so.
std::string shared_gpu_objection(const MpiSession& session, const DeviceInfo& device) {
  constexpr int kWidth = 64;
  char own[kWidth] = {};
  device.uuid.copy(own, kWidth - 1);
  std::vector<char> all(static_cast<size_t>(session.ranks()) * kWidth);
  const Waiting waiting("the GPUs of all ranks");
  check_mpi(MPI_Allgather(own, kWidth, MPI_CHAR, all.data(), kWidth, MPI_CHAR, session.comm()),
            "MPI_Allgather");
  for (int peer = 0; peer < session.rank(); ++peer)
    if (device.uuid == all.data() + static_cast<size_t>(peer) * kWidth)
      return text("ranks ", peer, " and ", session.rank(), " share a GPU, and it needs one for every rank");
  return "";
}

}  // namespace

TransportAttempt try_nccl(const MpiSession& session, const DeviceInfo& device) {
  std::string objection = first_objection(session, shared_gpu_objection(session, device));
  if (!objection.empty()) return {nullptr, std::move(objection)};
  ncclUniqueId id{};
  std::string own;
  if (session.is_root())
    if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess)
      own = text("NCCL could not start: ", nccl_words(result, nullptr));
  objection = first_objection(session, own);
  if (!objection.empty()) return {nullptr, std::move(objection)};
  broadcast_bytes(session, &id, sizeof id, 0);
  return prove(session, [&] { return std::make_unique<NcclTransport>(session, id); });
}

}  // namespace longhalo

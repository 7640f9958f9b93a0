// Device memory by way of pinned host memory and any MPI.
//
// All messages with one peer in one direction form one row of bytes, which travels in chunks; round k of an
// exchange moves chunk k of every row: device to host, MPI (HostSteps), host to device. Rounds take turns on
// two lanes, each a stream with its pinned buffer, so that one copies while the other sends. A peer has cut
// the same rows into the same chunks, so the two meet round by round, and pinned memory is bounded however
// long the messages are.
#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "comm/host_steps.hpp"
#include "comm/owned_comm.hpp"
#include "comm/transport_attempt.hpp"
#include "core/clock.hpp"
#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "device/cuda_check.hpp"
#include "device/pinned_buffer.hpp"
#include "device/stream.hpp"

namespace longhalo {
namespace {

constexpr int kTag = 31;
// Long enough for full speed, short enough that a halo of 16 MiB takes several and their copies overlap.
constexpr int64_t kLargestChunk = int64_t{8} << 20;
constexpr int64_t kSmallestChunk = int64_t{256} << 10;  // many ranks: memory grows rather than chunks shrink
constexpr int64_t kBufferBytes = int64_t{32} << 20;     // a lane and direction, within those bounds
constexpr double kEndSeconds = 30, kFlightSeconds = 1;  // orderly, and on the way out of an error

int64_t chunk_bytes(int ranks) {
  if (ranks == 1) return 0;
  return std::clamp(kBufferBytes / (ranks - 1) / 256 * 256, kSmallestChunk, kLargestChunk);
}

// The messages with one peer in one direction, one after the other.
class Row {
 public:
  void append(const DeviceMessage& message) {
    pieces_.push_back(message);
    bytes_ += message.bytes;
  }
  int64_t bytes() const { return bytes_; }

  // Calls copy(device, host offset, bytes) for the pieces of row bytes [begin, end).
  template <class Copy>
  void for_each_piece(int64_t begin, int64_t end, const Copy& copy) const {
    int64_t at = 0;
    for (const DeviceMessage& piece : pieces_) {
      const int64_t from = std::max(begin, at), to = std::min(end, at + piece.bytes);
      if (from < to) copy(static_cast<uint8_t*>(piece.data) + (from - at), from - begin, to - from);
      at += piece.bytes;
    }
  }

 private:
  std::vector<DeviceMessage> pieces_;
  int64_t bytes_ = 0;
};

struct HostMessage {
  int peer;
  uint8_t* data;
  int bytes;
};

struct Lane {
  explicit Lane(int64_t bytes) : buffer(bytes, "messages staged through the host") {}
  Stream stream{StreamPriority::kHigh};
  PinnedBuffer<uint8_t> buffer;
  Event done;
};

int exchange_on_host(MPI_Comm comm, const std::vector<HostMessage>& sends,
                     const std::vector<HostMessage>& receives) {
  std::vector<MPI_Request> requests(sends.size() + receives.size(), MPI_REQUEST_NULL);
  auto request = requests.begin();
  // Receives first, so that a message finds its place when it arrives.
  for (const HostMessage& message : receives) {
    const int code = MPI_Irecv(message.data, message.bytes, MPI_BYTE, message.peer, kTag, comm, &*request++);
    if (code != MPI_SUCCESS) return code;
  }
  for (const HostMessage& message : sends) {
    const int code = MPI_Isend(message.data, message.bytes, MPI_BYTE, message.peer, kTag, comm, &*request++);
    if (code != MPI_SUCCESS) return code;
  }
  // Waiting: HostSteps has one around each step.
  for (MPI_Request& each : requests) {  // one by one: the code of a failure is then its own
    const int code = MPI_Wait(&each, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS) return code;
  }
  return MPI_SUCCESS;
}

class StagedTransport final : public Transport {
 public:
  StagedTransport(const MpiSession& session, OwnedComm comm)
      : rank_(session.rank()), ranks_(session.ranks()), chunk_(chunk_bytes(ranks_)), comm_(std::move(comm)) {
    check(chunk_ * ranks_ <= std::numeric_limits<int>::max(),
          "staged chunks of all ranks fit MPI's displacements");
    if (ranks_ == 1) return;
    for (int i = 0; i < 2; ++i)
      lanes_.push_back(std::make_unique<Lane>(2 * chunk_ * (ranks_ - 1)));
  }
  ~StagedTransport() override;

  TransportChoice kind() const override { return TransportChoice::kStaged; }
  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }
  void check_health() override { steps_->check(); }
  void exchange(std::span<const DeviceMessage> sends, std::span<const DeviceMessage> receives,
                StreamHandle stream) override;
  void all_gather(void* data, std::span<const ByteRange> parts, StreamHandle stream) override;
  void broadcast(void* data, int64_t bytes, int root, StreamHandle stream) override;

 private:
  using Rows = std::map<int, Row>;  // by peer
  enum class Way { kToHost, kToDevice };

  Rows rows_of(std::span<const DeviceMessage> messages) const;
  Lane& next_lane();
  std::vector<HostMessage> slots(const Rows& rows, int64_t round, uint8_t* buffer) const;
  void copy(Way way, const Rows& rows, int64_t round, const std::vector<HostMessage>& slots, Lane& lane);
  void copy(Way way, void* device, uint8_t* host, int64_t bytes, Lane& lane);
  // Between them, work on the lanes stands where `stream` is.
  void enter(cudaStream_t stream);
  void leave(cudaStream_t stream);

  int rank_, ranks_;
  int64_t chunk_;
  OwnedComm comm_;
  std::unique_ptr<HostSteps> steps_ = std::make_unique<HostSteps>();
  std::vector<std::unique_ptr<Lane>> lanes_;
  size_t turn_ = 0;
  Event entered_;
};

StagedTransport::~StagedTransport() {
  // A step may wait for a rank that has gone. Then memory that CUDA and MPI still look at stays where it is.
  const double patience = std::uncaught_exceptions() > 0 ? kFlightSeconds : kEndSeconds;
  const Stopwatch watch;
  for (const auto& lane : lanes_)
    while (cudaStreamQuery(lane->stream) == cudaErrorNotReady) {
      if (watch.seconds() > patience) {
        log_cuda_failure(cudaErrorNotReady, "a staged message never ended; its memory is not released");
        for (auto& each : lanes_)
          static_cast<void>(each.release());
        static_cast<void>(steps_.release());
        comm_.forget();
        return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
}

Lane& StagedTransport::next_lane() {
  return *lanes_[turn_++ % lanes_.size()];
}

void StagedTransport::enter(cudaStream_t stream) {
  entered_.record(stream);
  for (const auto& lane : lanes_)
    entered_.make_wait(lane->stream);
}

void StagedTransport::leave(cudaStream_t stream) {
  for (const auto& lane : lanes_) {
    lane->done.record(lane->stream);
    lane->done.make_wait(stream);
  }
}

void StagedTransport::copy(Way way, void* device, uint8_t* host, int64_t bytes, Lane& lane) {
  const auto size = static_cast<size_t>(bytes);
  if (way == Way::kToHost)
    check_cuda(cudaMemcpyAsync(host, device, size, cudaMemcpyDeviceToHost, lane.stream),
               "copying to the host");
  else
    check_cuda(cudaMemcpyAsync(device, host, size, cudaMemcpyHostToDevice, lane.stream),
               "copying to the GPU");
}

StagedTransport::Rows StagedTransport::rows_of(std::span<const DeviceMessage> messages) const {
  Rows rows;
  for (const DeviceMessage& message : messages)
    if (travels(message)) rows[message.peer].append(message);
  return rows;
}

// Where the chunks of one round lie in the host buffer, one after the other.
std::vector<HostMessage> StagedTransport::slots(const Rows& rows, int64_t round, uint8_t* buffer) const {
  std::vector<HostMessage> chunks;
  for (const auto& [peer, row] : rows) {
    const int64_t left = row.bytes() - round * chunk_;
    if (left <= 0) continue;
    chunks.push_back({peer, buffer + static_cast<int64_t>(chunks.size()) * chunk_,
                      static_cast<int>(std::min(left, chunk_))});
  }
  return chunks;
}

void StagedTransport::copy(Way way, const Rows& rows, int64_t round, const std::vector<HostMessage>& slots,
                           Lane& lane) {
  for (const HostMessage& slot : slots) {
    const int64_t begin = round * chunk_;
    rows.at(slot.peer).for_each_piece(begin, begin + slot.bytes,
                                      [&](uint8_t* device, int64_t offset, int64_t bytes) {
                                        copy(way, device, slot.data + offset, bytes, lane);
                                      });
  }
}

void StagedTransport::exchange(std::span<const DeviceMessage> sends, std::span<const DeviceMessage> receives,
                               StreamHandle stream) {
  begin_exchange(sends, receives, stream);
  const Rows out = rows_of(sends), in = rows_of(receives);
  int64_t longest = 0;
  for (const Rows* rows : {&out, &in})
    for (const auto& [peer, row] : *rows)
      longest = std::max(longest, row.bytes());
  if (longest == 0) return;
  enter(stream);
  for (int64_t round = 0; round * chunk_ < longest; ++round) {
    Lane& lane = next_lane();
    const auto out_slots = slots(out, round, lane.buffer.data());
    const auto in_slots = slots(in, round, lane.buffer.data() + chunk_ * (ranks_ - 1));
    copy(Way::kToHost, out, round, out_slots, lane);
    steps_->queue(
        "an exchange through the host",
        [comm = comm_.get(), out_slots, in_slots] { return exchange_on_host(comm, out_slots, in_slots); },
        lane.stream);
    copy(Way::kToDevice, in, round, in_slots, lane);
  }
  leave(stream);
}

void StagedTransport::all_gather(void* data, std::span<const ByteRange> parts, StreamHandle stream) {
  begin_all_gather(parts);
  int64_t longest = 0;
  for (const ByteRange& part : parts)
    longest = std::max(longest, part.bytes);
  if (ranks_ == 1 || longest == 0) return;
  enter(stream);
  for (int64_t begin = 0; begin < longest; begin += chunk_) {
    Lane& lane = next_lane();
    std::vector<int> counts, places;
    for (int r = 0; r < ranks_; ++r) {
      counts.push_back(
          static_cast<int>(std::clamp<int64_t>(parts[static_cast<size_t>(r)].bytes - begin, 0, chunk_)));
      places.push_back(static_cast<int>(r * chunk_));
    }
    const auto copy_part = [&](Way way, int r) {
      const auto i = static_cast<size_t>(r);
      if (counts[i] == 0) return;
      copy(way, static_cast<uint8_t*>(data) + parts[i].offset + begin, lane.buffer.data() + places[i],
           counts[i], lane);
    };
    copy_part(Way::kToHost, rank_);
    steps_->queue(
        "an all-gather through the host",
        [comm = comm_.get(), host = lane.buffer.data(), counts, places] {
          // Waiting: of HostSteps.
          return MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_BYTE, host, counts.data(), places.data(), MPI_BYTE,
                                comm);
        },
        lane.stream);
    for (int r = 0; r < ranks_; ++r)
      if (r != rank_) copy_part(Way::kToDevice, r);
  }
  leave(stream);
}

void StagedTransport::broadcast(void* data, int64_t bytes, int root, StreamHandle stream) {
  begin_broadcast(bytes, root);
  if (ranks_ == 1 || bytes == 0) return;
  enter(stream);
  for (int64_t begin = 0; begin < bytes; begin += chunk_) {
    Lane& lane = next_lane();
    const int64_t count = std::min(chunk_, bytes - begin);
    uint8_t* device = static_cast<uint8_t*>(data) + begin;
    if (rank_ == root) copy(Way::kToHost, device, lane.buffer.data(), count, lane);
    steps_->queue(
        "a broadcast through the host",
        [comm = comm_.get(), host = lane.buffer.data(), count, root] {
          // Waiting: of HostSteps.
          return MPI_Bcast(host, static_cast<int>(count), MPI_BYTE, root, comm);
        },
        lane.stream);
    if (rank_ != root) copy(Way::kToDevice, device, lane.buffer.data(), count, lane);
  }
  leave(stream);
}

}  // namespace

TransportAttempt try_staged(const MpiSession& session) {
  if (session.ranks() > 1) {
    const bool threads = session.thread_level() >= MPI_THREAD_MULTIPLE;
    std::string objection =
        first_objection(session, threads ? "" : "MPI does not grant MPI_THREAD_MULTIPLE, which it needs");
    if (!objection.empty()) return {nullptr, std::move(objection)};
  }
  OwnedComm comm(session.comm());
  return prove(session, [&] { return std::make_unique<StagedTransport>(session, std::move(comm)); });
}

}  // namespace longhalo

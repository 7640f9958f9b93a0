#include "comm/transport_attempt.hpp"

#include <chrono>
#include <exception>
#include <limits>
#include <optional>
#include <thread>
#include <vector>

#include "core/clock.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "device/device_buffer.hpp"
#include "device/stream.hpp"

namespace longhalo {
namespace {

// Odd, and of both kinds: MPI sends what is short at once, and long messages between processes of a host by
// another way, which may not know this memory.
constexpr int64_t kProbes[] = {4099, (int64_t{4} << 20) + 5};
constexpr int64_t kLongest = kProbes[1];
constexpr double kProbeSeconds = 60;  // first messages make the connections

uint8_t probe_byte(int sender, int64_t offset) {
  return static_cast<uint8_t>(1 + (offset * 31 + int64_t{sender} * 7) % 251);
}

std::vector<uint8_t> probe_bytes(int sender, int64_t count) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    bytes[static_cast<size_t>(i)] = probe_byte(sender, i);
  return bytes;
}

// Sends some bytes around the ring of ranks and looks at what arrives, for a bounded time.
// NOTE: a probe that timed out is still queued: the transport must be destroyed (aborted) before it.
class NeighbourProbe {
 public:
  NeighbourProbe();
  // What went wrong on this rank; empty when nothing did.
  std::string objection(Transport& transport);

 private:
  std::string objection(Transport& transport, int64_t bytes);

  Stream stream_;
  DeviceBuffer<uint8_t> sent_, received_;
};

NeighbourProbe::NeighbourProbe()
    : sent_(kLongest, "a probe", stream_), received_(kLongest, "a probe", stream_) {}

std::string NeighbourProbe::objection(Transport& transport) {
  for (const int64_t bytes : kProbes)
    if (std::string words = objection(transport, bytes); !words.empty()) return words;
  return "";
}

std::string NeighbourProbe::objection(Transport& transport, int64_t bytes) {
  const int right = (transport.rank() + 1) % transport.ranks();
  const int left = (transport.rank() + transport.ranks() - 1) % transport.ranks();
  try {
    const std::vector<uint8_t> own = probe_bytes(transport.rank(), bytes);
    copy_async(sent_.data(), own.data(), bytes, stream_);
    check_cuda(cudaMemsetAsync(received_.data(), 0, static_cast<size_t>(bytes), stream_), "cudaMemsetAsync");
    const DeviceMessage send{right, sent_.data(), bytes}, receive{left, received_.data(), bytes};
    transport.exchange({&send, 1}, {&receive, 1}, stream_);
    Event arrived;
    arrived.record(stream_);
    const Stopwatch watch;
    while (!arrived.done()) {
      transport.check_health();
      if (watch.seconds() > kProbeSeconds)
        return text("a message to the next rank did not arrive within ", kProbeSeconds, " s");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    transport.check_health();
    std::vector<uint8_t> arrived_bytes(static_cast<size_t>(bytes));
    to_host<uint8_t>(arrived_bytes, received_.data(), stream_);
    if (arrived_bytes != probe_bytes(left, bytes))
      return "a message to the next rank arrived with other contents";
  } catch (const std::exception& error) {
    return short_words(error);
  }
  return "";
}

}  // namespace

std::string first_objection(const MpiSession& session, const std::string& own) {
  const int none = std::numeric_limits<int>::max();
  const int mine = own.empty() ? none : session.rank();
  int first = none;
  const Waiting waiting("an agreement on the transport");
  check_mpi(MPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, session.comm()), "MPI_Allreduce");
  if (first == none) return "";
  return broadcast_text(session, text(own, " (rank ", session.rank(), " on ", session.host(), ")"), first);
}

std::string short_words(const std::exception& error) {
  const std::string words = error.what();
  return words.substr(0, words.find('\n'));
}

TransportAttempt prove(const MpiSession& session, const std::function<std::unique_ptr<Transport>()>& make) {
  std::optional<NeighbourProbe> probe;  // first, so that it outlives the transport
  TransportAttempt attempt;
  std::string objection;
  try {
    probe.emplace();
    attempt.transport = make();
  } catch (const std::exception& error) {
    objection = short_words(error);
  }
  attempt.objection = first_objection(session, objection);
  if (attempt.objection.empty())
    attempt.objection = first_objection(session, probe->objection(*attempt.transport));
  if (!attempt.objection.empty() && attempt.transport != nullptr) {
    attempt.transport->abandon();
    attempt.transport.reset();
  }
  return attempt;
}

}  // namespace longhalo

// Moves DEVICE memory between ranks: one interface, three ways (transport_choice.hpp says which and when).
//
// Everything is queued on a stream and ordered by it; the host does not wait for data (`mpi` excepted, see
// mpi_transport.cpp). What the ranks owe each other, whatever the way:
//   - the operations of one transport are queued by every rank in one and the same order, from one thread, on
//     one stream or on streams that events put in that order; not while a stream is captured into a graph;
//   - one exchange() meets one exchange() of each peer: its sends to that peer are the peer's receives from
//     it, in the same order and of the same sizes; ranks without messages need not take part;
//   - memory that is sent stays unchanged, and memory that is received untouched, until the stream is past.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "comm/mpi_session.hpp"
#include "comm/transport_choice.hpp"
#include "device/device.hpp"
#include "device/stream_handle.hpp"

namespace longhalo {

/// `bytes` of device memory at `data` that go to or come from `peer`. `peer` may be the rank itself.
struct DeviceMessage {
  int peer = 0;
  void* data = nullptr;
  int64_t bytes = 0;
};

struct ByteRange {
  int64_t offset = 0;
  int64_t bytes = 0;
  bool operator==(const ByteRange&) const = default;
};

class Transport {
 public:
  Transport() = default;
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  virtual TransportChoice kind() const = 0;
  std::string_view name() const { return name_of(kind()); }
  virtual int rank() const = 0;
  virtual int ranks() const = 0;

  /// Queues all messages as one group; the data has moved when `stream` gets past it. Messages between two
  /// ranks match in order. Messages of 0 bytes are skipped.
  virtual void exchange(std::span<const DeviceMessage> sends, std::span<const DeviceMessage> receives,
                        StreamHandle stream) = 0;
  /// In place: part r of `data` is rank r's; afterwards every rank holds all parts. Sizes may differ and be
  /// 0; every rank passes the same parts. Collective.
  virtual void all_gather(void* data, std::span<const ByteRange> parts, StreamHandle stream) = 0;
  /// `data` of rank `root` on every rank. Collective.
  virtual void broadcast(void* data, int64_t bytes, int root, StreamHandle stream) = 0;

  /// Throws when an operation queued earlier has failed; cheap, so called at layer boundaries. What such an
  /// operation received is undefined.
  virtual void check_health() = 0;

  /// The job goes on without this transport, or ends in disorder: its destructor frees what it can and waits
  /// for no other rank.
  virtual void abandon() noexcept {}

  /// What this rank queued so far, in bytes; to itself and in vain (0 bytes) not counted.
  int64_t sent_bytes() const { return sent_bytes_; }
  int64_t received_bytes() const { return received_bytes_; }

 protected:
  /// What every operation begins with: its arguments checked, its bytes counted. Messages of a rank to itself
  /// are copied here, and left out by the transports.
  void begin_exchange(std::span<const DeviceMessage> sends, std::span<const DeviceMessage> receives,
                      StreamHandle stream);
  void begin_all_gather(std::span<const ByteRange> parts);
  void begin_broadcast(int64_t bytes, int root);
  bool travels(const DeviceMessage& message) const { return message.bytes > 0 && message.peer != rank(); }

 private:
  int64_t checked_bytes(std::span<const DeviceMessage> messages) const;

  int64_t sent_bytes_ = 0, received_bytes_ = 0;
};

struct ChosenTransport {
  std::unique_ptr<Transport> transport;
  std::string reason;  // one sentence for the log: which one, and why not the ones before it
};

/// The transport of all ranks of `session`, between the GPUs that are current there; `device` is this rank's.
/// Moves a few bytes between neighbours before it trusts a transport. Collective; all ranks choose alike.
/// Throws UserError, on every rank, that says why and what to do when `wanted` cannot be used.
/// `session` must outlive the transport.
ChosenTransport make_transport(const MpiSession& session, TransportChoice wanted, const DeviceInfo& device);

}  // namespace longhalo

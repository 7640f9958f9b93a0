#include "comm/transport.hpp"

#include <algorithm>
#include <vector>

#include "comm/transport_attempt.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "device/cuda_check.hpp"

namespace longhalo {
namespace {

TransportAttempt attempt(const MpiSession& session, TransportChoice choice, const DeviceInfo& device) {
  switch (choice) {
    case TransportChoice::kNccl:
      return try_nccl(session, device);
    case TransportChoice::kMpi:
      return try_mpi(session);
    default:
      return try_staged(session);
  }
}

std::vector<DeviceMessage> messages_with(std::span<const DeviceMessage> messages, int peer) {
  std::vector<DeviceMessage> chosen;
  for (const DeviceMessage& message : messages)
    if (message.peer == peer && message.bytes > 0) chosen.push_back(message);
  return chosen;
}

}  // namespace

// Bytes of the messages with other ranks.
int64_t Transport::checked_bytes(std::span<const DeviceMessage> messages) const {
  int64_t bytes = 0;
  for (const DeviceMessage& message : messages) {
    check(message.peer >= 0 && message.peer < ranks(), "a message goes to or comes from one of the ranks");
    check(message.bytes >= 0 && (message.bytes == 0 || message.data != nullptr), "a message has its bytes");
    if (message.peer != rank()) bytes += message.bytes;
  }
  return bytes;
}

void Transport::begin_exchange(std::span<const DeviceMessage> sends, std::span<const DeviceMessage> receives,
                               StreamHandle stream) {
  sent_bytes_ += checked_bytes(sends);
  received_bytes_ += checked_bytes(receives);
  const std::vector<DeviceMessage> from = messages_with(sends, rank()), to = messages_with(receives, rank());
  check(from.size() == to.size(), "what a rank sends to itself it receives from itself");
  for (size_t i = 0; i < from.size(); ++i) {
    check(from[i].bytes == to[i].bytes, "what a rank sends to itself it receives from itself");
    check_cuda(cudaMemcpyAsync(to[i].data, from[i].data, static_cast<size_t>(from[i].bytes),
                               cudaMemcpyDeviceToDevice, stream),
               "copying on the GPU");
  }
}

void Transport::begin_all_gather(std::span<const ByteRange> parts) {
  check(static_cast<int>(parts.size()) == ranks(), "an all-gather has a part for every rank");
  int64_t total = 0;
  for (const ByteRange& part : parts) {
    check(part.bytes >= 0 && part.offset >= 0, "a part of an all-gather has a place and a size");
    total += part.bytes;
  }
  const int64_t own = parts[static_cast<size_t>(rank())].bytes;
  sent_bytes_ += own * (ranks() - 1);
  received_bytes_ += total - own;
}

void Transport::begin_broadcast(int64_t bytes, int root) {
  check(root >= 0 && root < ranks() && bytes >= 0, "a broadcast has a root among the ranks and a size");
  if (ranks() > 1) (root == rank() ? sent_bytes_ : received_bytes_) += bytes;
}

ChosenTransport make_transport(const MpiSession& session, TransportChoice wanted, const DeviceInfo& device) {
  if (wanted == TransportChoice::kAuto && session.ranks() == 1) {  // spares what NCCL takes to start
    ChosenTransport chosen = make_transport(session, TransportChoice::kStaged, device);
    chosen.reason = "transport staged: there is one rank alone, so nothing travels";
    return chosen;
  }
  TransportObjections objections;
  for (;;) {
    const TransportChoice choice = choose_transport(wanted, objections);
    TransportAttempt made = attempt(session, choice, device);
    if (made.transport != nullptr)
      return {std::move(made.transport), transport_reason(wanted, choice, objections)};
    check(!made.objection.empty(), "a transport that is refused is refused with words");
    objections.of(choice) = std::move(made.objection);
  }
}

#ifndef LONGHALO_HAVE_NCCL
TransportAttempt try_nccl(const MpiSession&, const DeviceInfo&) {
  return {nullptr, "this build of longhalo has no NCCL"};
}
#endif

}  // namespace longhalo

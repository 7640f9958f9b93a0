// Device pointers handed to a CUDA-aware MPI.
//
// The simplest order that is right: the HOST waits until the stream is there, calls MPI, and returns when the
// data has moved. So messages do not hide behind compute with this transport; it is for machines that have a
// CUDA-aware MPI and no NCCL. (MPI must not be called from a host function here, as `staged` does: with
// device pointers it calls CUDA.)
//
// An MPI without CUDA ends in a segmentation fault when it meets a device pointer. So MPI is asked first, and
// then tried on the rank itself, under a handler that survives the fault.
#include <mpi.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <csetjmp>
#include <csignal>
#include <exception>
#include <vector>

#include "comm/message_parts.hpp"
#include "comm/owned_comm.hpp"
#include "comm/transport_attempt.hpp"
#include "core/error.hpp"
#include "core/waiting.hpp"
#include "device/cuda_check.hpp"
#include "device/device_buffer.hpp"
#include "device/stream.hpp"

namespace longhalo {
namespace {

constexpr int kTag = 41;

class MpiTransport final : public Transport {
 public:
  MpiTransport(const MpiSession& session, OwnedComm comm)
      : rank_(session.rank()), ranks_(session.ranks()), comm_(std::move(comm)) {}

  TransportChoice kind() const override { return TransportChoice::kMpi; }
  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }
  void check_health() override {}  // what fails throws at once

  void exchange(std::span<const DeviceMessage> sends, std::span<const DeviceMessage> receives,
                StreamHandle stream) override {
    begin_exchange(sends, receives, stream);
    move(sends, receives, stream);
  }

  void all_gather(void* data, std::span<const ByteRange> parts, StreamHandle stream) override {
    begin_all_gather(parts);
    std::vector<DeviceMessage> sends, receives;
    for (int peer = 0; peer < ranks_; ++peer) {
      const ByteRange& own = parts[static_cast<size_t>(rank_)];
      const ByteRange& theirs = parts[static_cast<size_t>(peer)];
      sends.push_back({peer, static_cast<uint8_t*>(data) + own.offset, own.bytes});
      receives.push_back({peer, static_cast<uint8_t*>(data) + theirs.offset, theirs.bytes});
    }
    move(sends, receives, stream);
  }

  void broadcast(void* data, int64_t bytes, int root, StreamHandle stream) override {
    begin_broadcast(bytes, root);
    wait_for_stream(stream, "what this rank's GPU has to do before a message");
    for_each_message(static_cast<uint8_t*>(data), bytes, [&](uint8_t* at, int count) {
      const Waiting waiting("a broadcast between GPUs by MPI");
      check_mpi(MPI_Bcast(at, count, MPI_BYTE, root, comm_.get()), "MPI_Bcast of GPU memory");
    });
  }

 private:
  void move(std::span<const DeviceMessage> sends, std::span<const DeviceMessage> receives,
            StreamHandle stream) {
    wait_for_stream(stream, "what this rank's GPU has to do before a message");
    std::vector<MPI_Request> requests;
    const auto post = [&](std::span<const DeviceMessage> messages, auto call, const char* name) {
      for (const DeviceMessage& message : messages) {
        if (!travels(message)) continue;
        for_each_message(static_cast<uint8_t*>(message.data), message.bytes, [&](uint8_t* at, int count) {
          requests.push_back(MPI_REQUEST_NULL);
          check_mpi(call(at, count, MPI_BYTE, message.peer, kTag, comm_.get(), &requests.back()), name);
        });
      }
    };
    post(receives, MPI_Irecv, "MPI_Irecv of GPU memory");
    post(sends, MPI_Isend, "MPI_Isend of GPU memory");
    const Waiting waiting("a halo between GPUs by MPI");
    check_mpi(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE),
              "MPI_Waitall");
  }

  int rank_, ranks_;
  OwnedComm comm_;
};

#ifdef MPIX_CUDA_AWARE_SUPPORT  // Open MPI's extension; its value speaks for the MPI at build time alone

std::string query_objection() {
  return MPIX_Query_cuda_support() == 1 ? "" : "MPI says that it was built without CUDA";
}

thread_local volatile std::sig_atomic_t in_trial = 0;
sigjmp_buf before_trial;

extern "C" void leave_trial(int signal) {
  if (in_trial != 0) siglongjmp(before_trial, 1);
  std::signal(signal, SIG_DFL);  // a fault of somebody else: it happens again, and ends the process
}

constexpr int kCrashed = -1;  // no MPI code: those are MPI_SUCCESS and positive ones

// MPI's code, or kCrashed. On its own, so that nothing is alive here that the jump could spoil.
[[gnu::noinline]] int send_to_self(const void* source, void* target, int bytes, MPI_Comm self) {
  if (sigsetjmp(before_trial, 1) != 0) {
    in_trial = 0;
    return kCrashed;
  }
  in_trial = 1;
  // Waiting: for nobody, the message is to itself.
  const int code = MPI_Sendrecv(source, bytes, MPI_BYTE, 0, kTag, target, bytes, MPI_BYTE, 0, kTag, self,
                                MPI_STATUS_IGNORE);
  in_trial = 0;
  return code;
}

// Whether MPI moves device memory from this rank to itself; a segmentation fault is a no.
std::string trial_objection() {
  constexpr int kBytes = 4099;
  const Stream stream;
  const OwnedComm self(MPI_COMM_SELF);
  const std::vector<uint8_t> sent(kBytes, 0x5a);
  std::vector<uint8_t> arrived(kBytes, 0);
  const DeviceBuffer<uint8_t> source = to_device<uint8_t>(sent, "a trial message", stream);
  DeviceBuffer<uint8_t> target = to_device<uint8_t>(arrived, "a trial message", stream);

  struct sigaction guard = {}, segmentation = {}, bus = {};
  guard.sa_handler = leave_trial;
  sigemptyset(&guard.sa_mask);
  sigaction(SIGSEGV, &guard, &segmentation);
  sigaction(SIGBUS, &guard, &bus);
  const int code = send_to_self(source.data(), target.data(), kBytes, self.get());
  sigaction(SIGSEGV, &segmentation, nullptr);
  sigaction(SIGBUS, &bus, nullptr);

  if (code == kCrashed) return "MPI says that it was built with CUDA, but crashed on GPU memory";
  if (code != MPI_SUCCESS) return "MPI says that it was built with CUDA, but refused GPU memory";
  to_host<uint8_t>(arrived, target.data(), stream);
  return arrived == sent ? "" : "MPI says that it was built with CUDA, but GPU memory arrived damaged";
}

#else

std::string query_objection() {
  return "this MPI has no way to say whether it knows GPUs";
}
std::string trial_objection() {
  return query_objection();
}

#endif

// GPU memory that runs out on one rank must not leave the others waiting for its answer.
std::string trial_objection_or_error() {
  try {
    return trial_objection();
  } catch (const std::exception& error) {
    return short_words(error);
  }
}

}  // namespace

TransportAttempt try_mpi(const MpiSession& session) {
  std::string objection = first_objection(session, query_objection());
  if (objection.empty()) objection = first_objection(session, trial_objection_or_error());
  if (!objection.empty()) return {nullptr, std::move(objection)};
  OwnedComm comm(session.comm());
  return prove(session, [&] { return std::make_unique<MpiTransport>(session, std::move(comm)); });
}

}  // namespace longhalo

// An NCCL communicator that never blocks for ever: it is non-blocking, every call is polled to its end under
// a deadline, and its end is bounded, too (NCCL's own abort has been seen to hang).
#pragma once

#include <nccl.h>

#include <functional>
#include <mutex>
#include <string>

#include "comm/mpi_session.hpp"

namespace longhalo {

class NcclCommunicator {
 public:
  /// Between the devices that are current on the ranks of `session`. Throws UserError with NCCL's words when
  /// it cannot be made within two minutes. Not collective through MPI, but every rank must call it with one
  /// `id`.
  NcclCommunicator(const MpiSession& session, const ncclUniqueId& id);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  ncclComm_t get() const { return comm_; }
  /// Makes `calls` of NCCL and waits until it has queued them; the first message between two ranks makes
  /// their connection here. `what` is a literal that names them. Throws UserError with NCCL's words when that
  /// failed.
  void run(const char* what, const std::function<ncclResult_t()>& calls);
  void check_health();
  /// What NCCL says is wrong, or nothing. Any thread may ask.
  std::string fault();
  /// From here on the destructor aborts and does not wait for the other ranks.
  void abandon() noexcept { healthy_ = false; }

 private:
  [[noreturn]] void fail(ncclResult_t result, const char* what);
  void close() noexcept;

  // NOTE: asking for the state is not only reading: NCCL takes finished work apart there, without a lock.
  std::mutex mutex_;

  ncclComm_t comm_ = nullptr;
  int device_ = 0;
  bool healthy_ = true;
  std::string where_;  // rank and host, for messages
};

/// NCCL's words for `result`, and its account of the last error.
std::string nccl_words(ncclResult_t result, ncclComm_t comm);

}  // namespace longhalo

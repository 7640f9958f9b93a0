// A communicator of one's own, so that one's messages never meet those of others. Errors are returned.
#pragma once

#include <mpi.h>

#include <utility>

#include "comm/mpi_session.hpp"
#include "core/waiting.hpp"

namespace longhalo {

class OwnedComm {
 public:
  /// Collective over `parent`.
  explicit OwnedComm(MPI_Comm parent) {
    const Waiting waiting("a communicator of its own");
    check_mpi(MPI_Comm_dup(parent, &comm_), "MPI_Comm_dup");
    check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  // Freeing is collective in the standard's words, but the MPIs we know of wait for nobody.
  ~OwnedComm() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0 && comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
  }
  OwnedComm(OwnedComm&& other) noexcept : comm_(std::exchange(other.comm_, MPI_COMM_NULL)) {}
  OwnedComm& operator=(OwnedComm&&) = delete;
  OwnedComm(const OwnedComm&) = delete;
  OwnedComm& operator=(const OwnedComm&) = delete;

  MPI_Comm get() const { return comm_; }
  /// Leaves the communicator to MPI's end: something may still use it.
  void forget() { comm_ = MPI_COMM_NULL; }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

}  // namespace longhalo

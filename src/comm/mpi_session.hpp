// MPI's life in this process: initialised once, finalised in order, aborted as a whole when a rank cannot go
// on.
//
// An error that may hit one rank only (a file missing on one host) is met inside together(): all ranks learn
// of it and leave by the same road. An error anywhere else ends in abort(), since peers may be waiting in a
// message.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.hpp"

namespace longhalo {

/// A failure that every rank knows of; only `reporting_rank` needs to print it.
class JointError : public std::runtime_error {
 public:
  JointError(const std::string& message, ExitCode exit_code, int reporting_rank)
      : std::runtime_error(message), exit_code(exit_code), reporting_rank(reporting_rank) {}
  ExitCode exit_code;
  int reporting_rank;
};

class MpiSession {
 public:
  /// Calls MPI_Init_thread, asking for MPI_THREAD_MULTIPLE: messages staged for a GPU are sent by a thread of
  /// CUDA's. What MPI grants is thread_level(). Throws UserError when Slurm started several tasks but MPI
  /// sees one rank.
  MpiSession(int* argc, char*** argv);
  /// The ranks of `parent` as a session of their own, while another session keeps MPI alive: MPI_COMM_SELF is
  /// this rank alone. Collective over `parent`.
  explicit MpiSession(MPI_Comm parent);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  MPI_Comm comm() const { return comm_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  bool is_root() const { return rank_ == 0; }
  /// MPI_THREAD_..., as MPI granted it.
  int thread_level() const { return thread_level_; }
  int local_rank() const { return local_rank_; }
  int local_ranks() const { return local_ranks_; }
  const std::string& host() const { return host_; }
  /// Host names of all ranks, on every rank. Collective.
  std::vector<std::string> hosts() const;

  /// Runs `work` on this rank; when it throws on any rank, throws the same JointError on all. Collective.
  void together(const std::function<void()>& work) const;

  /// Runs `work`. An error that only this rank knows of is logged and ends all ranks at once, before what
  /// `work` works on is taken down, which may take long or wait for the others. A JointError passes.
  ExitCode or_end_all(const std::function<ExitCode()>& work) const;

  /// From here on expect_same() compares; the same on all ranks.
  void set_check_operations(bool checks) { checks_operations_ = checks; }
  /// Before an operation of all ranks: where it is not the same on all (its name, the bytes), throws a
  /// JointError that names the first rank that differs. Collective, or nothing without
  /// set_check_operations().
  void expect_same(const char* operation, int64_t bytes = 0) const;

  /// Ends all ranks with `exit_code`; returns never.
  [[noreturn]] void abort(ExitCode exit_code) const;

 private:
  void join(MPI_Comm parent);

  bool owns_mpi_ = false;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, ranks_ = 1, local_rank_ = 0, local_ranks_ = 1;
  int thread_level_ = MPI_THREAD_SINGLE;
  std::string host_;
  bool checks_operations_ = false;
  mutable int64_t operations_ = 0;  // compared so far
};

/// Throws InvariantError with MPI's own words unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* call);

/// Returns when all ranks have come here. Collective.
void wait_for_all(const MpiSession& session);

/// `value` of rank 0 on every rank. Collective. Any length: messages over 1 GiB are split.
void broadcast_bytes(const MpiSession& session, void* data, int64_t bytes, int root);
std::string broadcast_text(const MpiSession& session, std::string value, int root = 0);
int64_t broadcast_count(const MpiSession& session, int64_t value, int root = 0);

/// The strings of all ranks in rank order, on rank 0; empty elsewhere. Collective.
std::vector<std::string> gather_text(const MpiSession& session, const std::string& value);

/// Smallest, mean and largest of `value` over all ranks, on every rank. Collective.
struct RankSpread {
  double min, mean, max;
};
RankSpread spread_over_ranks(const MpiSession& session, double value);
int64_t sum_over_ranks(const MpiSession& session, int64_t value);
/// The bits that are set on any rank, on every rank. Collective.
uint64_t bits_of_ranks(const MpiSession& session, uint64_t bits);

}  // namespace longhalo

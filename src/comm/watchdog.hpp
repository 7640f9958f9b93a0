// Ends a job that hangs. A thread of each rank looks at what the rank waits for (core/waiting.hpp). What has
// gone on for longer than the deadline is said, with step, layer, operation and the ranks that it waits for,
// and the process leaves with ExitCode::kHung; the launcher then ends the others. All ranks that wait for the
// same thing began to about the same time, so each of them speaks; the one that is silent is where to look.
// Where they go by TCP, each also says which hosts still answer (comm/tcp_peers.hpp).
//
// Nothing here calls MPI or NCCL: their own ways to abort have been seen to hang.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/job_hosts.hpp"
#include "comm/tcp_peers.hpp"

namespace longhalo {

class Watchdog {
 public:
  /// While deadline_seconds() is 0 it watches over nothing. `rank`: -1 as long as nobody knows.
  /// `told_to_end`: whether a launcher has asked this process to end; a rank that is then quiet for a part of
  /// the deadline says where it stands. Called on the thread.
  Watchdog(int rank, std::string host, std::function<bool()> told_to_end);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// From here on it speaks for this rank, and names hosts: MPI has started.
  void set_rank(int rank, JobHosts hosts);

 private:
  // `awake_seconds`: since this process stood still as a whole.
  void look(double deadline, double awake_seconds);
  std::string names_of(const std::vector<int>& ranks) const;
  std::string place() const;
  [[noreturn]] void end(const std::string& words, double deadline) const;

  int rank_;
  std::string host_;
  std::function<bool()> told_to_end_;
  bool has_spoken_ = false;
  TcpPeers peers_;
  std::mutex mutex_;  // held by the thread while it looks
  std::condition_variable wake_;
  bool is_over_ = false;
  std::thread thread_;
};

}  // namespace longhalo

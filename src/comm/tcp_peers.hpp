// Which hosts of the job still answer by TCP. A rank that waits for all the others, in an agreement or a sum,
// cannot know for which of them; the kernel does, where MPI or NCCL go by TCP: it is told to ask the other
// end of each connection once a second (keepalive), and says when that end was last heard.
//
// The connections are the libraries' own, and stay as they are otherwise; none is opened, and nothing of MPI
// is called. Of InfiniBand and shared memory this knows nothing, and says nothing.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "comm/job_hosts.hpp"
#include "core/clock.hpp"

namespace longhalo {

/// Not for several threads at once.
class TcpPeers {
 public:
  explicit TcpPeers(JobHosts hosts = {}) : hosts_(std::move(hosts)) {}
  ~TcpPeers() { stop_asking(); }
  TcpPeers(const TcpPeers&) = delete;
  TcpPeers& operator=(const TcpPeers&) = delete;

  const JobHosts& hosts() const { return hosts_; }
  void set_hosts(JobHosts hosts) { hosts_ = std::move(hosts); }

  /// From here on the kernel asks, on the connections to other hosts that this process has now. Nothing where
  /// it does already.
  void ask();
  /// The connections' settings are again what they were.
  void stop_asking();
  /// "no answer by TCP for 3.1 s from node3 (rank 2); node1 (rank 0) answers". Empty where there was no
  /// connection to ask on, or for less than two seconds.
  std::string describe() const;

 private:
  static constexpr size_t kOptions = 4;
  struct Connection {
    int socket;
    std::string peer, host;
    std::array<int, kOptions> before;
  };

  JobHosts hosts_;
  bool asks_ = false;
  Stopwatch asked_;
  std::vector<Connection> connections_;
};

}  // namespace longhalo

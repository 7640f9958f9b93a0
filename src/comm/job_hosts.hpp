// Names for messages: which host a rank runs on, and which host a network address belongs to.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

namespace longhalo {

class MpiSession;

struct JobHosts {
  std::vector<std::string> of_rank;               // or empty: not known yet
  std::map<std::string, std::string> of_address;  // "10.0.0.3": those that one host of the job alone has

  /// "rank 2 (node3)", "ranks 0 (node1) and 2 (node3)"; without hosts where they are not known.
  std::string name_ranks(std::span<const int> ranks) const;
  /// "node3 (ranks 4 and 5)".
  std::string name_host(const std::string& host) const;
};

/// The same on all ranks. Collective.
JobHosts hosts_of_job(const MpiSession& session);

}  // namespace longhalo

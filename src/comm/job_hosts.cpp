#include "comm/job_hosts.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <set>
#include <sstream>

#include "comm/mpi_session.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr size_t kMostListed = 8;

// "10.0.0.3 fd00::3", of the interfaces of this host that lead elsewhere.
std::string own_addresses() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};  // messages do without
  std::string all;
  for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_LOOPBACK) != 0) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    char numbers[NI_MAXHOST];
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (::getnameinfo(one->ifa_addr, size, numbers, sizeof numbers, nullptr, 0, NI_NUMERICHOST) == 0)
      all += text(numbers, ' ');
  }
  ::freeifaddrs(first);
  return all;
}

}  // namespace

std::string JobHosts::name_ranks(std::span<const int> ranks) const {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    names += text(i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
    const auto rank = static_cast<size_t>(ranks[i]);
    if (rank < of_rank.size()) names += text(" (", of_rank[rank], ")");
  }
  return names;
}

std::string JobHosts::name_host(const std::string& host) const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < of_rank.size(); ++rank)
    if (of_rank[rank] == host) ranks.push_back(static_cast<int>(rank));
  if (ranks.empty()) return host;
  if (ranks.size() > kMostListed) return text(host, " (", ranks.size(), " ranks from ", ranks.front(), ")");
  return text(host, " (", JobHosts().name_ranks(ranks), ")");
}

JobHosts hosts_of_job(const MpiSession& session) {
  JobHosts hosts{session.hosts(), {}};
  const std::vector<std::string> addresses =
      gather_text(session, session.local_rank() == 0 ? own_addresses() : std::string());
  std::string lines;
  for (size_t rank = 0; rank < addresses.size(); ++rank) {
    std::istringstream words(addresses[rank]);
    for (std::string address; words >> address;)
      lines += text(address, ' ', hosts.of_rank[rank], '\n');
  }
  std::istringstream words(broadcast_text(session, lines));
  // A bridge for containers has the same address everywhere.
  std::set<std::string> ambiguous;
  for (std::string address, host; words >> address >> host;)
    if (const auto at = hosts.of_address.emplace(address, host).first; at->second != host)
      ambiguous.insert(address);
  for (const std::string& address : ambiguous)
    hosts.of_address.erase(address);
  return hosts;
}

}  // namespace longhalo

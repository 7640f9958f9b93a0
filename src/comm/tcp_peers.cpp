#include "comm/tcp_peers.hpp"

#include <dirent.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string_view>

#include "core/text.hpp"

namespace longhalo {
namespace {

// The kernel asks on a connection that was silent for a second, again after each further one, and gives it up
// after so many that the deadline comes first.
struct Option {
  int level, name, value;
};
constexpr std::array<Option, 4> kAsking{{{IPPROTO_TCP, TCP_KEEPIDLE, 1},
                                         {IPPROTO_TCP, TCP_KEEPINTVL, 1},
                                         {IPPROTO_TCP, TCP_KEEPCNT, 127},
                                         {SOL_SOCKET, SO_KEEPALIVE, 1}}};
constexpr double kShortestAsking = 2;  // seconds: an answer to the first question may take a good one
constexpr double kSilentShare = 0.75;  // of the time since the first question
constexpr size_t kMostNamed = 8;

struct End {
  std::string address, port;
  bool operator==(const End&) const = default;
};

// `name` is getpeername or getsockname.
std::optional<End> end_of(int socket, int (*name)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage end{};
  socklen_t size = sizeof end;
  char address[NI_MAXHOST], port[NI_MAXSERV];
  if (name(socket, reinterpret_cast<sockaddr*>(&end), &size) != 0 ||
      ::getnameinfo(reinterpret_cast<const sockaddr*>(&end), size, address, sizeof address, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return std::nullopt;
  constexpr std::string_view kMapped = "::ffff:";  // an IPv4 address, at a socket that takes both kinds
  std::string number = address;
  if (number.starts_with(kMapped)) number.erase(0, kMapped.size());
  return End{number, port};
}

// The other end of an established TCP connection to another host; empty of anything else.
std::optional<End> peer_of(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_state != TCP_ESTABLISHED)
    return std::nullopt;
  const auto own = end_of(socket, ::getsockname), other = end_of(socket, ::getpeername);
  return own && other && own->address != other->address ? other : std::nullopt;
}

std::string name_of(const End& end) {
  return text(end.address, ' ', end.port);
}

// Since anything came from the other end, be it data or word that it has got ours.
double silent_seconds(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  return std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv) / 1e3;
}

std::vector<int> open_files() {
  std::vector<int> files;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), ::closedir);
  if (!folder) return files;
  while (const dirent* entry = ::readdir(folder.get()))
    if (entry->d_name[0] != '.') files.push_back(std::atoi(entry->d_name));
  return files;
}

}  // namespace

void TcpPeers::ask() {
  static_assert(kAsking.size() == kOptions);
  if (asks_) return;
  asks_ = true;
  asked_.restart();
  for (const int socket : open_files()) {
    const std::optional<End> peer = peer_of(socket);
    if (!peer) continue;
    const auto host = hosts_.of_address.find(peer->address);
    if (host == hosts_.of_address.end()) continue;
    Connection connection{socket, name_of(*peer), host->second, {}};
    for (size_t i = 0; i < kOptions; ++i) {
      socklen_t size = sizeof(int);
      ::getsockopt(socket, kAsking[i].level, kAsking[i].name, &connection.before[i], &size);
    }
    for (const auto& [level, name, value] : kAsking)
      ::setsockopt(socket, level, name, &value, sizeof value);
    connections_.push_back(std::move(connection));
  }
}

void TcpPeers::stop_asking() {
  asks_ = false;
  for (const Connection& connection : connections_) {
    // A connection that was closed meanwhile may have left its number to another.
    if (const auto peer = peer_of(connection.socket); !peer || name_of(*peer) != connection.peer) continue;
    for (size_t i = kOptions; i-- > 0;)  // the switch first
      ::setsockopt(connection.socket, kAsking[i].level, kAsking[i].name, &connection.before[i], sizeof(int));
  }
  connections_.clear();
}

std::string TcpPeers::describe() const {
  const double asked = asked_.seconds();
  if (!asks_ || asked < kShortestAsking) return {};
  std::map<std::string, double> silent;  // by host: the longest of its connections
  for (const Connection& connection : connections_) {
    if (const auto peer = peer_of(connection.socket); !peer || name_of(*peer) != connection.peer) continue;
    double& longest = silent[connection.host];
    longest = std::max(longest, silent_seconds(connection.socket));
  }
  std::string no_answer, answer;
  size_t silent_hosts = 0, hosts = 0;
  for (const auto& [host, seconds] : silent) {
    const bool answers = seconds < kSilentShare * asked;
    std::string& list = answers ? answer : no_answer;
    size_t& count = answers ? hosts : silent_hosts;
    if (++count > kMostNamed) continue;
    list += text(count > 1 ? ", " : "", hosts_.name_host(host));
    if (!answers) list += text(" for ", std::round(10 * seconds) / 10, " s");
  }
  for (const auto& [count, list] : {std::pair(silent_hosts, &no_answer), std::pair(hosts, &answer)})
    if (count > kMostNamed) *list += text(" and ", count - kMostNamed, " more");
  answer += hosts > 1 ? " answer" : " answers";
  if (silent_hosts == 0) return hosts == 0 ? std::string() : answer + " by TCP";
  return text("no answer by TCP from ", no_answer, hosts == 0 ? "" : "; ", hosts == 0 ? "" : answer);
}

}  // namespace longhalo

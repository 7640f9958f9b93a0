// What TCP tells of other hosts. Two addresses of the loopback interface stand for two hosts; hosts that do
// not answer are those of tests/network.
#include "comm/tcp_peers.hpp"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <thread>

namespace longhalo {
namespace {

const JobHosts kHosts{{"node1", "node2", "node2", "node3"}, {{"127.0.0.1", "node1"}, {"127.0.0.2", "node2"}}};

sockaddr_in address_of(const char* numbers) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  ::inet_pton(AF_INET, numbers, &address.sin_addr);
  return address;
}

// A connection of this process with itself, from one address to another.
class Connected {
 public:
  Connected(const char* from, const char* to)
      : listener_(::socket(AF_INET, SOCK_STREAM, 0)), near_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in here = address_of(from), there = address_of(to);
    socklen_t size = sizeof there;
    auto* const at = reinterpret_cast<sockaddr*>(&there);
    EXPECT_EQ(::bind(listener_, at, size), 0);
    EXPECT_EQ(::listen(listener_, 1), 0);
    EXPECT_EQ(::getsockname(listener_, at, &size), 0);
    EXPECT_EQ(::bind(near_, reinterpret_cast<sockaddr*>(&here), sizeof here), 0);
    EXPECT_EQ(::connect(near_, at, size), 0);
    far_ = ::accept(listener_, nullptr, nullptr);
    EXPECT_GE(far_, 0);
  }
  ~Connected() {
    for (const int socket : {listener_, near_, far_})
      ::close(socket);
  }
  Connected(const Connected&) = delete;
  Connected& operator=(const Connected&) = delete;

  int near() const { return near_; }
  int far() const { return far_; }

 private:
  int listener_, near_, far_ = -1;
};

int option(int socket, int level, int name) {
  int value = -1;
  socklen_t size = sizeof value;
  EXPECT_EQ(::getsockopt(socket, level, name, &value, &size), 0);
  return value;
}

TEST(JobHosts, AreNamedWithTheirRanks) {
  EXPECT_EQ(kHosts.name_ranks(std::array{3}), "rank 3 (node3)");
  EXPECT_EQ(kHosts.name_ranks(std::array{0, 2, 3}), "ranks 0 (node1), 2 (node2) and 3 (node3)");
  EXPECT_EQ(JobHosts().name_ranks(std::array{1, 0}), "ranks 1 and 0");
  EXPECT_EQ(kHosts.name_host("node2"), "node2 (ranks 1 and 2)");
  EXPECT_EQ(kHosts.name_host("elsewhere"), "elsewhere");
  EXPECT_EQ((JobHosts{std::vector<std::string>(20, "big"), {}}).name_host("big"), "big (20 ranks from 0)");
}

TEST(TcpPeers, AreAskedAndLeftAsTheyWere) {
  const Connected other("127.0.0.1", "127.0.0.2"), same("127.0.0.1", "127.0.0.1"),
      unknown("127.0.0.1", "127.0.0.3");
  const int before = option(other.near(), IPPROTO_TCP, TCP_KEEPIDLE);
  TcpPeers peers(kHosts);
  EXPECT_EQ(peers.describe(), "");
  peers.ask();
  EXPECT_EQ(option(other.near(), SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_EQ(option(other.far(), SOL_SOCKET, SO_KEEPALIVE), 1) << "it leads to node1";
  EXPECT_EQ(option(other.near(), IPPROTO_TCP, TCP_KEEPIDLE), 1);
  EXPECT_EQ(option(same.near(), SOL_SOCKET, SO_KEEPALIVE), 0);
  EXPECT_EQ(option(unknown.near(), SOL_SOCKET, SO_KEEPALIVE), 0);
  EXPECT_EQ(peers.describe(), "") << "nobody can have answered yet";
  std::this_thread::sleep_for(std::chrono::milliseconds(2200));
  EXPECT_EQ(peers.describe(), "node1 (rank 0), node2 (ranks 1 and 2) answer by TCP");
  peers.stop_asking();
  EXPECT_EQ(option(other.near(), SOL_SOCKET, SO_KEEPALIVE), 0);
  EXPECT_EQ(option(other.near(), IPPROTO_TCP, TCP_KEEPIDLE), before);
  EXPECT_EQ(peers.describe(), "");
}

TEST(TcpPeers, OfAConnectionThatIsGoneNothingIsSaid) {
  TcpPeers peers(kHosts);
  {
    const Connected other("127.0.0.1", "127.0.0.2");
    peers.ask();
  }
  const Connected unknown("127.0.0.1", "127.0.0.3");  // has the numbers of that
  std::this_thread::sleep_for(std::chrono::milliseconds(2200));
  EXPECT_EQ(peers.describe(), "");
  peers.stop_asking();
  EXPECT_EQ(option(unknown.near(), SOL_SOCKET, SO_KEEPALIVE), 0);
}

}  // namespace
}  // namespace longhalo

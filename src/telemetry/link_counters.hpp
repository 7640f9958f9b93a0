// What the ports of InfiniBand and RoCE cards count, as the kernel shows it in files:
//   <root>/<device>/ports/<port>/{state,rate,link_layer}, counters/<name>, hw_counters/<name>
// Cards count from the last boot on, so only what is added while a job runs says anything of the job:
// LinkWatch remembers the counts of errors and tells which have grown. Hosts without such cards have no
// ports; tests replace the root by a folder of their own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace longhalo {

inline constexpr const char* kLinkFolder = "/sys/class/infiniband";

struct LinkPort {
  std::string device;      // "mlx5_0"
  std::string port;        // "1"
  std::string state;       // "4: ACTIVE"
  std::string rate;        // "400 Gb/sec (4X NDR)"
  std::string link_layer;  // "InfiniBand" or "Ethernet"
  /// All that the port counts, by the kernel's names; those of hw_counters/ beside those of counters/.
  std::map<std::string, int64_t> counters;

  /// "mlx5_0 port 1"
  std::string name() const { return device + " port " + port; }
  bool is_active() const { return state.find("ACTIVE") != std::string::npos; }
};

/// All ports in order of name. What cannot be read is left out: a card may lack any of the files, and some
/// drivers say "N/A" in place of a number. Never throws.
std::vector<LinkPort> read_link_ports(const std::filesystem::path& root = kLinkFolder);

/// Whether a counter grows because bits were damaged, a link went down, or something had to be sent again.
bool is_link_error(const std::string& counter);

/// An error counter that has grown.
struct LinkErrors {
  std::string device, port, counter;
  int64_t added = 0;  // since it was last looked at
  int64_t count = 0;  // now

  /// "mlx5_0 port 1: symbol_error +3 (now 17)"
  std::string describe() const;
};

class LinkWatch {
 public:
  /// Errors counted so far are nobody's.
  explicit LinkWatch(std::filesystem::path root = kLinkFolder);
  /// Since the last call, or since it was made. A counter that was set back counts from 0.
  std::vector<LinkErrors> grown();

 private:
  using Key = std::pair<std::string, std::string>;  // port's name, counter
  std::filesystem::path root_;
  std::map<Key, int64_t> seen_;
};

}  // namespace longhalo

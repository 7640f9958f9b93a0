#include "device/available_memory.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace longhalo {
namespace {

// Where no limit is known: more than any host has, and callers may still add to it.
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 4;

// The number in a file, or the one after `key` in a file of keys and numbers; -1 where there is none ("max"
// too).
int64_t number_in(const std::filesystem::path& file, const std::string& key = "") {
  std::ifstream in(file);
  std::string word;
  while (!key.empty() && in >> word && word != key) {
  }
  int64_t number = -1;
  return in >> number ? number : -1;
}

// What the control groups of this process (a Slurm job's memory limit) still allow; unlimited where none
// limits it.
int64_t available_group_bytes() {
  int64_t available = kNoLimit;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::/")) continue;  // version 2
    std::filesystem::path group = std::filesystem::path("/sys/fs/cgroup") / line.substr(4);
    for (; group != "/sys/fs"; group = group.parent_path()) {
      const int64_t most = number_in(group / "memory.max");
      const int64_t now = number_in(group / "memory.current");
      const int64_t files =
          std::max<int64_t>(0, number_in(group / "memory.stat", "file"));  // given back when asked for
      if (most >= 0 && now >= 0) available = std::min(available, most - now + files);
    }
  }
  return available;
}

}  // namespace

int64_t available_host_bytes() {
  const int64_t group = available_group_bytes();
  std::ifstream in("/proc/meminfo");
  for (std::string key; in >> key;) {
    int64_t kibibytes = 0;
    if (key == "MemAvailable:" && in >> kibibytes) return std::min(group, kibibytes * 1024);
  }
  return group;
}

}  // namespace longhalo

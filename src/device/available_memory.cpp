#include "device/available_memory.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "core/error.hpp"
#include "core/text.hpp"

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

struct GroupFiles {
  const char *most, *now, *files;  // the last is a key of memory.stat: given back when asked for
};
constexpr GroupFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"};
constexpr GroupFiles kVersion2{"memory.max", "memory.current", "file"};

// What a group and those above it, up to the folder `top`, still allow. A container may see less of the tree
// than its processes' names for it say: what is not there limits nothing.
int64_t left_in_group(const std::filesystem::path& top, const std::string& group, const GroupFiles& names) {
  int64_t available = kNoLimit;
  std::filesystem::path folder = (top / group.substr(1)).lexically_normal();
  for (const std::filesystem::path end = top.parent_path(); folder != end && folder != folder.root_path();
       folder = folder.parent_path()) {
    const int64_t most = number_in(folder / names.most);
    const int64_t now = number_in(folder / names.now);
    const int64_t files = std::max<int64_t>(0, number_in(folder / "memory.stat", names.files));
    if (most >= 0 && now >= 0) available = std::min(available, std::min(most, kNoLimit) - now + files);
  }
  return available;
}

// What the control groups of this process (a Slurm job's memory limit) still allow; unlimited where none
// limits it. A line is "0::/group" (version 2) or "4:cpu,memory:/group" (version 1).
int64_t available_group_bytes() {
  int64_t available = kNoLimit;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(":/", first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first, second - first) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ":,") {
      available = std::min(available, left_in_group("/sys/fs/cgroup", group, kVersion2));
    } else if (controllers.find(":memory,") != std::string::npos ||
               controllers.find(",memory,") != std::string::npos) {
      available = std::min(available, left_in_group("/sys/fs/cgroup/memory", group, kVersion1));
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

void require_host_memory(int64_t bytes_of_rank, int ranks, std::string_view setting) {
  constexpr int64_t kMega = 1'000'000;
  const int64_t available = available_host_bytes();
  if (bytes_of_rank <= available / ranks) return;
  throw UserError(text(setting, " asks for ", (bytes_of_rank + kMega - 1) / kMega, " MB of host memory",
                       ranks > 1 ? text(" for each of the ", ranks, " ranks of this host") : "",
                       ", and there are ", available / kMega, " MB"),
                  "this host",
                  text("make ", setting.substr(0, setting.find(' ')), " smaller",
                       ranks > 1 ? ", or start fewer ranks on a host" : ""));
}

}  // namespace longhalo

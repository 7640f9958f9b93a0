#include "telemetry/memory.hpp"

#include <fstream>
#include <sstream>
#include <string>

namespace longhalo {

ProcessMemory process_memory() {
  ProcessMemory memory;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    std::istringstream fields(line);
    std::string key;
    int64_t kib = 0;
    if (!(fields >> key >> kib)) continue;
    if (key == "VmRSS:") memory.resident = kib * 1024;
    if (key == "VmHWM:") memory.peak_resident = kib * 1024;
    if (key == "RssAnon:") memory.anonymous = kib * 1024;
    if (key == "RssFile:") memory.file = kib * 1024;
  }
  return memory;
}

}  // namespace longhalo

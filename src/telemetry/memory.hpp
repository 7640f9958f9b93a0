// Memory of this process as the kernel counts it (/proc/self/status).
#pragma once

#include <cstdint>

namespace longhalo {

/// All in bytes; 0 where the kernel does not say.
struct ProcessMemory {
  int64_t resident = 0;       // now: anonymous + files + shared
  int64_t peak_resident = 0;  // most so far
  int64_t anonymous = 0;      // heap, stacks: what the process allocated itself
  int64_t file = 0;           // mapped files, e.g. a checkpoint; the kernel may take these back at any time
};

ProcessMemory process_memory();

}  // namespace longhalo

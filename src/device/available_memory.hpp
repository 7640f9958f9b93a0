// Host memory that is left: what the machine has, within what the job's control groups allow.
#pragma once

#include <cstdint>

namespace longhalo {

/// Bytes that can still be allocated on this host, by all its processes together; where nothing says, no
/// limit is known and the number is larger than any host's (2^61).
int64_t available_host_bytes();

}  // namespace longhalo

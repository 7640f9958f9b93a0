// Host memory that is left: what the machine has, within what the job's control groups allow.
#pragma once

#include <cstdint>
#include <string_view>

namespace longhalo {

/// Bytes that can still be allocated on this host, by all its processes together; where nothing says, no
/// limit is known and the number is larger than any host's (2^61).
int64_t available_host_bytes();

/// Throws UserError where each of `ranks` ranks of this host needs so many bytes, and that is more than the
/// host has. `setting` is what asks for them: "bench.bytes 100 (--bytes)".
void require_host_memory(int64_t bytes_of_rank, int ranks, std::string_view setting);

}  // namespace longhalo

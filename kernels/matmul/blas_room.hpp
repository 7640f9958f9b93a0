// Whether OpenBLAS finds room for its buffers. Where there is none it asks again without end: as it is
// loaded, which is before main, and when it is given more threads.
#pragma once

#include <cstddef>

namespace longhalo {

/// A buffer, of which a thread has one: the largest that OpenBLAS is built with, and a page beside it.
inline constexpr size_t kBlasBufferBytes = (size_t{128} << 20) + 4096;

/// Ends the process, with exit code 2 and a message, where the buffers that OpenBLAS takes as it is loaded
/// would find no room. To be called before that, from .preinit_array: it takes no library but libc, and of
/// that little. `environment` is the process's.
void require_room_for_blas(const char* const* environment);

}  // namespace longhalo

#include "kernels/matmul/blas_room.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace longhalo {
namespace {

constexpr long kMostThreads = 128;                 // that Linux distributions build OpenBLAS for
constexpr size_t kOthersBytes = size_t{16} << 20;  // what libraries that are loaded before it may take

// As OpenBLAS counts them, which looks at no binding.
long threads_at_load(const char* const* environment) {
  constexpr std::string_view kName = "OMP_NUM_THREADS=";
  const long cores = std::clamp(::sysconf(_SC_NPROCESSORS_CONF), 1L, kMostThreads);
  for (; *environment != nullptr; ++environment)
    if (std::strncmp(*environment, kName.data(), kName.size()) == 0)
      if (const int named = std::atoi(*environment + kName.size()); named > 0)
        return std::min<long>(named, cores);
  return cores;
}

}  // namespace

void require_room_for_blas(const char* const* environment) {
  constexpr std::string_view kMessage =
      "longhalo error: out of host memory: there is no room for the buffers of OpenBLAS, 128 MiB a thread\n"
      "  where:  this process, before its start\n"
      "  remedy: raise the limit of a process's memory (ulimit -v), or set OMP_NUM_THREADS to the cores of a "
      "rank\n";
  const auto size_of = [](long room) { return kBlasBufferBytes + (room == 0 ? kOthersBytes : 0); };
  void* rooms[kMostThreads];
  const long threads = threads_at_load(environment);
  long count = 0;
  for (; count < threads; ++count) {
    rooms[count] =
        ::mmap(nullptr, size_of(count), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (rooms[count] == MAP_FAILED) break;
  }
  for (long i = 0; i < count; ++i)
    ::munmap(rooms[i], size_of(i));
  if (count == threads) return;
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kMessage.data(), kMessage.size());
  ::_exit(2);
}

}  // namespace longhalo

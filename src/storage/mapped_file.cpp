#include "storage/mapped_file.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

struct Entry {
  std::atomic<uintptr_t> begin{0};  // 0: free; set last, cleared first
  std::atomic<size_t> bytes{0};
  std::atomic<const std::string*> words{nullptr};
};

// More files than a model has; one that finds no place is mapped all the same.
constexpr size_t kEntries = 4096;
std::array<Entry, kEntries> entries;
std::mutex changes;
struct sigaction before;

// NOTE: runs in a signal handler: nothing but atomics, write() and _exit().
void on_bus_error(int number, siginfo_t* info, void* context) {
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  for (const Entry& entry : entries) {
    const uintptr_t begin = entry.begin;
    if (begin == 0 || at < begin || at - begin >= entry.bytes) continue;
    const std::string& words = *entry.words.load();
    [[maybe_unused]] const ssize_t put = ::write(STDERR_FILENO, words.data(), words.size());
    ::_exit(static_cast<int>(ExitCode::kUserError));
  }
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr)
    return before.sa_sigaction(number, info, context);
  ::signal(number, SIG_DFL);
  ::raise(number);  // ends the process when this handler has returned
}

void listen() {
  static const bool listens = [] {
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO;
    ::sigemptyset(&action.sa_mask);
    return ::sigaction(SIGBUS, &action, &before) == 0;
  }();
  check(listens, "a handler of SIGBUS can be set");
}

}  // namespace

MappedFile::MappedFile(const InputFile& input, const std::filesystem::path& path)
    : words_(
          text("longhalo error: the file ended early, or its disk failed, while it was read\n  where:  ",
               path.string(),
               "\n  remedy: another program may have shortened it: start again when it is complete; else see "
               "what dmesg says of the disk\n")),
      place_(kEntries) {
  const auto size = static_cast<size_t>(input.size_bytes);
  void* const mapping = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, input.descriptor.get(), 0);
  if (mapping == MAP_FAILED) throw_file_error(errno, "map", path);
  bytes_ = {static_cast<const std::byte*>(mapping), size};
  const std::lock_guard lock(changes);
  listen();
  for (place_ = 0; place_ < kEntries && entries[place_].begin != 0; ++place_) {
  }
  if (place_ == kEntries) return;
  entries[place_].bytes = size;
  entries[place_].words = &words_;
  entries[place_].begin = reinterpret_cast<uintptr_t>(mapping);
}

MappedFile::~MappedFile() {
  if (place_ < kEntries) entries[place_].begin = 0;
  ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace longhalo

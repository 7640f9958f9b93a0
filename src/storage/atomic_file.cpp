#include "storage/atomic_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <optional>
#include <vector>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/text.hpp"
#include "storage/posix.hpp"

namespace longhalo {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kMark = ".tmp.";
constexpr int kMostLinks = 40;  // as many as the system follows

struct Writer {
  std::string host;
  pid_t process;
};

// The inverse of the name that TemporaryFile gives: <target>.tmp.<host>.<process>-<n>.
std::optional<Writer> writer_of(const std::string& name) {
  const size_t mark = name.rfind(kMark);
  const size_t dot = name.rfind('.');
  const size_t dash = name.rfind('-');
  if (mark == std::string::npos || dash == std::string::npos) return std::nullopt;
  const size_t host_begin = mark + kMark.size();
  if (dot < host_begin || dash < dot) return std::nullopt;
  pid_t process = 0;
  const char* const end = name.data() + dash;
  const auto [stopped, error] = std::from_chars(name.data() + dot + 1, end, process);
  if (error != std::errc{} || stopped != end || process <= 0) return std::nullopt;
  return Writer{name.substr(host_begin, dot - host_begin), process};
}

bool is_abandoned(const fs::directory_entry& entry, const Writer& writer) {
  if (writer.host == host_name()) return ::kill(writer.process, 0) != 0 && errno == ESRCH;
  std::error_code error;
  const auto written = entry.last_write_time(error);
  return !error && fs::file_time_type::clock::now() - written > std::chrono::hours(24);
}

// Whether it is a link into /proc, as /dev/stdout is, which may well be a regular file then.
bool leads_to_open_file(fs::path path) {
  std::error_code ignored;
  for (int i = 0; i < kMostLinks && fs::is_symlink(fs::symlink_status(path, ignored)); ++i) {
    const fs::path folder = fs::weakly_canonical(fs::absolute(path, ignored).parent_path(), ignored);
    if (folder.string().starts_with("/proc/")) return true;
    path = folder / fs::read_symlink(path, ignored);
  }
  return false;
}

// A rename would put a file in place of a device or of /dev/stdout, for all programs of the machine.
void refuse_special(const fs::path& target) {
  struct stat status {};
  if (::stat(target.c_str(), &status) != 0) return;
  const bool plain = S_ISREG(status.st_mode) || S_ISDIR(status.st_mode);
  if (plain && !leads_to_open_file(target)) return;
  throw UserError(plain ? "this leads to a file that is open already; no other is put in its place"
                        : "a device, pipe or socket stands there; a file is not put in its place",
                  target.string(), "name a file");
}

// What the system says against taking it away; 0 for nothing.
int removal_fault(const fs::path& path) {
  struct statx entry {};
  if (::statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, STATX_TYPE, &entry) != 0)
    return errno == ENOENT ? 0 : errno;
  if ((entry.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0) return EBUSY;
  // NOTE: the wrong call of the two: it looks at the rights first and then fails, so that nothing is removed.
  const bool is_folder = S_ISDIR(entry.stx_mode);
  if ((is_folder ? ::unlink(path.c_str()) : ::rmdir(path.c_str())) == 0) return 0;
  return errno == (is_folder ? EISDIR : ENOTDIR) || errno == ENOENT ? 0 : errno;
}

void read_back(const TemporaryFile& temporary, std::span<const std::byte> contents) {
  const InputFile input = open_input(temporary.path());
  bool same = input.size_bytes == static_cast<int64_t>(contents.size());
  std::vector<std::byte> block(std::min<size_t>(contents.size(), size_t{1} << 20));
  for (size_t at = 0; same && at < contents.size(); at += block.size()) {
    const std::span<std::byte> part = std::span(block).first(std::min(block.size(), contents.size() - at));
    read_exactly(input.descriptor, static_cast<int64_t>(at), part, temporary.path());
    same = std::equal(part.begin(), part.end(), contents.begin() + static_cast<std::ptrdiff_t>(at));
  }
  if (!same) {
    throw UserError("what was read back differs from what was written", temporary.target().string(),
                    "the disk or file system is damaged; choose another place");
  }
}

}  // namespace

TemporaryFile::TemporaryFile(fs::path target) : target_(std::move(target)) {
  refuse_shared_link(target_.parent_path());
  refuse_special(target_);
  static std::atomic<int> counter{0};
  path_ = target_;
  path_ += text(kMark, host_name(), ".", ::getpid(), "-", counter++);
}

TemporaryFile::~TemporaryFile() {
  if (committed_) return;
  // NOTE: a library that met a full disk may keep the file open until the process ends, and with it the
  // space. Cutting it to nothing gives the space back at once.
  [[maybe_unused]] const int cut = ::truncate(path_.c_str(), 0);
  ::unlink(path_.c_str());
}

void TemporaryFile::sync() const {
  const FileDescriptor descriptor(::open(path_.c_str(), O_RDWR | O_CLOEXEC));
  if (!descriptor.is_open()) throw_file_error(errno, "open", path_);
  sync_file(descriptor, path_);
  drop_cache(descriptor);
}

void TemporaryFile::commit_to(const fs::path& place) {
  refuse_special(place);
  if (::rename(path_.c_str(), place.c_str()) != 0) throw_file_error(errno, "replace", place);
  committed_ = true;
  sync_directory(place.parent_path());
}

void write_file_atomically(const fs::path& target, std::span<const std::byte> contents) {
  TemporaryFile temporary(target);
  const int64_t bytes_needed = static_cast<int64_t>(contents.size());
  {
    const FileDescriptor descriptor(
        ::open(temporary.path().c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!descriptor.is_open()) throw_write_error(errno, target, bytes_needed);
    write_all(descriptor, contents, target, bytes_needed);
    sync_file(descriptor, target);
    drop_cache(descriptor);
  }
  read_back(temporary, contents);
  temporary.commit();
}

void write_file_atomically(const fs::path& target, std::string_view contents) {
  write_file_atomically(target, std::as_bytes(std::span(contents.data(), contents.size())));
}

void require_replaceable(const fs::path& target) {
  if (target.empty()) return;
  refuse_special(target);
  std::error_code ignored;
  if (fs::is_directory(target, ignored)) throw_write_error(EISDIR, target, 0);
  const fs::path folder = target.has_parent_path() ? target.parent_path() : ".";
  // The dot: a file in place of the folder is refused too.
  if (::access((folder / ".").c_str(), W_OK | X_OK) != 0) throw_write_error(errno, target, 0);
  refuse_shared_link(folder);
  require_removable(target);
}

void require_removable(const fs::path& path) {
  const int error = removal_fault(path);
  if (error == 0) return;
  throw UserError(
      text("what stands there cannot be replaced: ", std::strerror(error)), path.string(),
      "let its owner or root take it away (ls -l shows the owner, findmnt what is mounted, lsattr "
      "what is immutable), or choose another place");
}

fs::path end_of_trusted_links(const fs::path& target) {
  refuse_special(target);
  fs::path place = target;
  std::error_code error;
  for (int i = 0; fs::is_symlink(fs::symlink_status(place, error)); ++i) {
    if (i == kMostLinks) throw_write_error(ELOOP, target, 0);
    refuse_shared_link(place);
    place = place.parent_path() / fs::read_symlink(place, error);
    if (error) throw_file_error(error.value(), "follow", target);
  }
  return place;
}

int remove_abandoned_temporaries(const fs::path& directory, Abandoned which) {
  int removed = 0;
  std::error_code error;
  fs::directory_iterator entry(directory, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::optional<Writer> writer = writer_of(entry->path().filename().string());
    std::error_code ignored;
    if (!writer || !entry->is_regular_file(ignored)) continue;
    if (which == Abandoned::kAll || is_abandoned(*entry, *writer))
      removed += fs::remove(entry->path(), ignored);
  }
  return removed;
}

}  // namespace longhalo

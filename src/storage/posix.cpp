#include "storage/posix.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace fs = std::filesystem;
namespace {

// Linux moves at most 2 GiB - 4 KiB in one call; smaller pieces also keep a full disk's error close to its
// cause.
constexpr size_t kMaxTransferBytes = size_t{1} << 30;

std::string_view remedy_for(int error) {
  switch (error) {
    case ENOENT:
      return "check the path; the file or a folder on the way to it does not exist";
    case ENOTDIR:
      return "check the path; a part of it is a file, not a folder";
    case EISDIR:
      return "name a file, not a folder";
    case EACCES:
    case EPERM:
      return "give this user the right to it (ls -l shows the owner), or choose another place";
    case EROFS:
      return "the file system is mounted read-only; choose another place";
    case EMFILE:
    case ENFILE:
      return "raise the limit of open files (ulimit -n)";
    case ELOOP:
      return "a symbolic link points to itself; repair it";
    case ENAMETOOLONG:
      return "use a shorter path";
    default:
      return "check the disk and the file system (dmesg may say more)";
  }
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  close();
}
FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}
void FileDescriptor::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

InputFile open_input(const fs::path& file) {
  // O_NONBLOCK: opening a FIFO must not wait for its writer. It has no effect on regular files.
  InputFile input{FileDescriptor(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)), 0};
  if (!input.descriptor.is_open()) throw_file_error(errno, "open", file);
  struct stat status {};
  if (::fstat(input.descriptor.get(), &status) != 0) throw_file_error(errno, "inspect", file);
  if (S_ISDIR(status.st_mode)) throw_file_error(EISDIR, "read", file);
  if (!S_ISREG(status.st_mode)) {
    throw UserError("this is a device, pipe or socket, not a regular file", file.string(),
                    "copy its contents to a file and name that");
  }
  input.size_bytes = status.st_size;
  return input;
}

void read_exactly(const FileDescriptor& descriptor, int64_t offset, std::span<std::byte> bytes,
                  const fs::path& file) {
  while (!bytes.empty()) {
    const ssize_t got =
        ::pread(descriptor.get(), bytes.data(), std::min(bytes.size(), kMaxTransferBytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_file_error(errno, "read", file);
    if (got == 0) {
      throw UserError("the file ended " + std::to_string(bytes.size()) + " bytes early", file.string(),
                      "another program shortened it while it was read; start again when it is complete");
    }
    offset += got;
    bytes = bytes.subspan(static_cast<size_t>(got));
  }
}

void write_all(const FileDescriptor& descriptor, std::span<const std::byte> bytes, const fs::path& file,
               int64_t bytes_needed) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(descriptor.get(), bytes.data(), std::min(bytes.size(), kMaxTransferBytes));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw_write_error(errno, file, bytes_needed);
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
}

void write_exactly(const FileDescriptor& descriptor, int64_t offset, std::span<const std::byte> bytes,
                   const fs::path& file, int64_t bytes_needed) {
  while (!bytes.empty()) {
    const ssize_t put =
        ::pwrite(descriptor.get(), bytes.data(), std::min(bytes.size(), kMaxTransferBytes), offset);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw_write_error(errno, file, bytes_needed);
    offset += put;
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
}

void sync_file(const FileDescriptor& descriptor, const fs::path& file) {
  // NOTE: after a failed fsync the kernel may drop the dirty pages, so a second fsync that succeeds proves
  // nothing.
  if (::fsync(descriptor.get()) != 0) throw_write_error(errno, file, 0);
}

void drop_cache(const FileDescriptor& descriptor) {
  ::posix_fadvise(descriptor.get(), 0, 0, POSIX_FADV_DONTNEED);  // advice: a refusal costs only certainty
}

void sync_directory(const fs::path& directory) {
  const fs::path where = directory.empty() ? fs::path(".") : directory;
  const FileDescriptor descriptor(::open(where.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!descriptor.is_open()) throw_file_error(errno, "open", where);
  // Some network file systems have no fsync for folders; their rename is durable by itself.
  if (::fsync(descriptor.get()) != 0 && errno != EINVAL && errno != ENOTSUP) {
    throw_file_error(errno, "sync", where);
  }
}

int64_t free_bytes(const fs::path& path) {
  fs::path where = path;
  struct statvfs status {};
  while (::statvfs(where.empty() ? "." : where.c_str(), &status) != 0) {
    if (errno != ENOENT || where.empty() || where == where.parent_path()) return -1;
    where = where.parent_path();
  }
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
}

void require_space(const fs::path& file, int64_t bytes_needed) {
  const int64_t available = free_bytes(file);
  if (available >= 0 && available < bytes_needed) throw_write_error(ENOSPC, file, bytes_needed);
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

void throw_file_error(int error, std::string_view action, const fs::path& file) {
  throw UserError(text("cannot ", action, " it: ", std::strerror(error)), file.string(),
                  text(remedy_for(error), error == ENOENT ? start_of_relative(file) : ""));
}

std::string_view write_remedy(int error) {
  switch (error) {
    case ENOSPC:
      return "free space on this file system, or choose a place on another one";
    case EDQUOT:
      return "the user's or project's quota is used up; remove files or choose another place";
    case EFBIG:
      return "raise the limit of the file size (ulimit -f), or choose another file system";
    default:
      return remedy_for(error);
  }
}

void throw_write_error(int error, const fs::path& file, int64_t bytes_needed) {
  std::string what = text("cannot write it: ", std::strerror(error));
  const bool lacks_room = error == ENOSPC || error == EDQUOT || error == EFBIG;
  if (lacks_room && bytes_needed > 0) what += text("; ", bytes_needed, " bytes needed");
  const int64_t available = lacks_room ? free_bytes(file) : -1;
  if (available >= 0) what += text("; ", available, " bytes free on this file system");
  throw UserError(what, file.string(), write_remedy(error));
}

}  // namespace longhalo

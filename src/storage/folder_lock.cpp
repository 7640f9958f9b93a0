#include "storage/folder_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/log.hpp"
#include "core/text.hpp"

namespace longhalo {

FileDescriptor open_lock_file(const std::filesystem::path& file, mode_t mode) {
  refuse_shared_link(file.parent_path());
  FileDescriptor lock(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, mode));
  const int error = errno;
  std::error_code ignored;
  const std::filesystem::file_status there = std::filesystem::symlink_status(file, ignored);
  if (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there))
    throw UserError(text("a ",
                         std::filesystem::is_symlink(there)     ? "link"
                         : std::filesystem::is_directory(there) ? "folder"
                                                                : "pipe, socket or device",
                         " has the name of the file by which jobs keep out of each other's way"),
                    file.string(), "remove it: jobs make that file themselves");
  if (lock.is_open()) return lock;
  throw_write_error(error, file, 4096);
}

FolderLock::FolderLock(const std::filesystem::path& directory) : file_(directory / ".longhalo.lock") {
  for (;;) {
    lock_ = open_lock_file(file_, 0666);
    if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) {
        std::array<char, 300> holder{};
        const ssize_t got = ::pread(lock_.get(), holder.data(), holder.size() - 1, 0);
        throw UserError(text("another job is writing into this folder", got > 0 ? ": " : "", holder.data()),
                        directory.string(), "wait for that job to end, or choose another output folder");
      }
      log_warning(text(file_.string(), " cannot be locked on this file system; take care that no other job ",
                       "writes into this folder"));
    }
    // The holder before us may have removed the file between our open and our lock; then ours is no longer in
    // the folder and the next job would not see it.
    struct stat ours {};
    struct stat current {};
    if (::fstat(lock_.get(), &ours) == 0 && ::stat(file_.c_str(), &current) == 0 &&
        ours.st_ino == current.st_ino) {
      break;
    }
  }
  const std::string holder = text("process ", ::getpid(), " on ", host_name());
  // Only for the message above: a full disk is met, with a better error, by the first output.
  [[maybe_unused]] const int cut = ::ftruncate(lock_.get(), 0);
  [[maybe_unused]] const ssize_t put = ::pwrite(lock_.get(), holder.data(), holder.size(), 0);
}

FolderLock::~FolderLock() {
  ::unlink(file_.c_str());
}

}  // namespace longhalo

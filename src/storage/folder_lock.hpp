// Keeps a second job out of an output folder: flock on <folder>/.longhalo.lock, which the kernel drops when
// the holder dies, however it dies.
#pragma once

#include <sys/types.h>

#include <filesystem>

#include "storage/posix.hpp"

namespace longhalo {

/// Opens the file of a lock, which is made if it is missing. Throws UserError, also where a link or a folder
/// has its name.
FileDescriptor open_lock_file(const std::filesystem::path& file, mode_t mode);

class FolderLock {
 public:
  /// Takes the lock of an existing folder. Throws UserError naming the holder if another job has it. Where
  /// the file system knows no locks, a warning is logged and the job goes on.
  explicit FolderLock(const std::filesystem::path& directory);
  /// Removes the lock file and drops the lock.
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  std::filesystem::path file_;
  FileDescriptor lock_;
};

}  // namespace longhalo

// A folder of this process on node-local scratch, gone when the process ends. What a killed process left is
// removed by the next one of the same user on the same host; whether a process lives is told by a lock that
// the kernel drops at its death, so a live job's folder is never touched.
#pragma once

#include <filesystem>
#include <string_view>

#include "storage/posix.hpp"

namespace longhalo {

/// What processes that are gone left.
enum class DeadFolders { kLeave, kRemove };

class JobScratch {
 public:
  /// Makes `directory` if it is missing, removes folders of dead processes in it, and makes
  /// longhalo-activations@<host>@<job>@rank<rank>@<process>-<n>. Throws UserError.
  JobScratch(const std::filesystem::path& directory, std::string_view job, int rank);
  /// Throws UserError where a JobScratch in `directory` could not be; makes nothing that stays.
  static void require_usable(const std::filesystem::path& directory, DeadFolders dead);
  /// Removes the folder and all that is in it.
  ~JobScratch();
  JobScratch(const JobScratch&) = delete;
  JobScratch& operator=(const JobScratch&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  FileDescriptor alive_;
};

}  // namespace longhalo

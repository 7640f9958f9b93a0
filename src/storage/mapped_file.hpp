// A file in memory, read-only. Where another program shortens it, or its disk fails, the read of a page that
// is not there any more is a SIGBUS, which would end the process without a word: here it ends with the file's
// name and exit code 2, like other faults of files.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

#include "storage/posix.hpp"

namespace longhalo {

class MappedFile {
 public:
  /// Maps all of an open file, which must not be empty; `path` is for messages. Throws UserError.
  MappedFile(const InputFile& input, const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::string words_;  // what is said on SIGBUS, when nothing can be allocated
  std::span<const std::byte> bytes_;
  size_t place_;  // in the table that the signal's handler looks at
};

}  // namespace longhalo

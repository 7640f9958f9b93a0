// A plain file that appears whole or not at all and is proven to be what was written: temporary file ->
// fsync -> read back from the disk and compare checksums -> rename -> fsync the folder.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

#include "storage/atomic_file.hpp"
#include "storage/checksum.hpp"
#include "storage/posix.hpp"

namespace longhalo {

/// Size and Checksum64 of a whole file.
struct FileSum {
  int64_t bytes = 0;
  uint64_t checksum = 0;
  bool operator==(const FileSum&) const = default;
};

/// Reads the file. Throws UserError.
FileSum sum_of_file(const std::filesystem::path& file);

class VerifiedFile {
 public:
  /// Checks that `bytes_needed` are free and makes the temporary file. Throws UserError.
  VerifiedFile(const std::filesystem::path& target, int64_t bytes_needed);

  /// Appends. Throws UserError.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view bytes);

  /// Forces it to the disk and reads it back. Throws UserError if that differs.
  FileSum verify();
  /// After verify(): the rename.
  void commit();

 private:
  TemporaryFile temporary_;
  FileDescriptor descriptor_;
  int64_t bytes_needed_;
  int64_t bytes_ = 0;
  Checksum64 checksum_;
  bool is_verified_ = false;
};

}  // namespace longhalo

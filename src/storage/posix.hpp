// The few POSIX file calls that storage stands on, each with an error that names the file and the remedy.
// std::fstream hides errno, cannot fsync and reports a full disk late or never, so it is not used for output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace longhalo {

/// Owns one file descriptor. The destructor ignores close() errors: code that writes calls fsync first.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void close();

 private:
  int fd_ = -1;
};

struct InputFile {
  FileDescriptor descriptor;
  int64_t size_bytes = 0;
};

/// Opens a regular file for reading. Throws UserError if it is missing, a directory, a device or not
/// readable.
InputFile open_input(const std::filesystem::path& file);

/// Reads exactly bytes.size() bytes from `offset`. Throws UserError on an I/O error or an early end of file.
void read_exactly(const FileDescriptor& descriptor, int64_t offset, std::span<std::byte> bytes,
                  const std::filesystem::path& file);

/// Writes all bytes at the descriptor's position. `bytes_needed` is the size of the whole undertaking, for
/// the message. Throws UserError (with bytes needed and bytes free when the disk is full).
void write_all(const FileDescriptor& descriptor, std::span<const std::byte> bytes,
               const std::filesystem::path& file, int64_t bytes_needed);

/// Writes all bytes at `offset`. The rest as write_all().
void write_exactly(const FileDescriptor& descriptor, int64_t offset, std::span<const std::byte> bytes,
                   const std::filesystem::path& file, int64_t bytes_needed);

/// Forces data to the disk. Throws UserError.
void sync_file(const FileDescriptor& descriptor, const std::filesystem::path& file);
void sync_directory(const std::filesystem::path& directory);

/// Asks the kernel to forget its copy of a synced file, so that reading it back reads the disk.
void drop_cache(const FileDescriptor& descriptor);

/// Bytes that this user may still write on the file system which holds `path` or its nearest existing parent;
/// -1 if that cannot be found out. Quotas are not seen: the write itself finds those.
int64_t free_bytes(const std::filesystem::path& path);

/// Throws UserError unless `bytes_needed` are free where `file` will be written.
void require_space(const std::filesystem::path& file, int64_t bytes_needed);

/// The name of this machine, "unknown" if it has none.
std::string host_name();

/// Throws the UserError for errno value `error` met while `action` ("open", "read", ...).
[[noreturn]] void throw_file_error(int error, std::string_view action, const std::filesystem::path& file);
/// The same for writing: says how many bytes were needed and how many are free.
[[noreturn]] void throw_write_error(int error, const std::filesystem::path& file, int64_t bytes_needed);
/// What to do about errno value `error` met while writing.
std::string_view write_remedy(int error);

}  // namespace longhalo

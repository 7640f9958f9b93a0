#include "storage/verified_file.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "core/error.hpp"

namespace longhalo {
namespace fs = std::filesystem;
namespace {

const fs::path& with_space(const fs::path& target, int64_t bytes_needed) {
  require_space(target, bytes_needed);
  return target;
}

}  // namespace

FileSum sum_of_file(const fs::path& file) {
  constexpr int64_t kBlockBytes = int64_t{1} << 20;
  const InputFile input = open_input(file);
  std::vector<std::byte> block(static_cast<size_t>(std::min(kBlockBytes, input.size_bytes)));
  Checksum64 checksum;
  for (int64_t at = 0; at < input.size_bytes; at += kBlockBytes) {
    const auto part =
        std::span(block).first(static_cast<size_t>(std::min(kBlockBytes, input.size_bytes - at)));
    read_exactly(input.descriptor, at, part, file);
    checksum.update(part);
  }
  return {input.size_bytes, checksum.value()};
}

VerifiedFile::VerifiedFile(const fs::path& target, int64_t bytes_needed)
    : temporary_(with_space(target, bytes_needed)), bytes_needed_(bytes_needed) {
  descriptor_ =
      FileDescriptor(::open(temporary_.path().c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!descriptor_.is_open()) throw_write_error(errno, target, bytes_needed);
}

void VerifiedFile::write(std::span<const std::byte> bytes) {
  check(descriptor_.is_open(), "a file is written before it is verified");
  write_all(descriptor_, bytes, temporary_.target(), bytes_needed_);
  checksum_.update(bytes);
  bytes_ += static_cast<int64_t>(bytes.size());
}

void VerifiedFile::write(std::string_view bytes) {
  write(std::as_bytes(std::span(bytes.data(), bytes.size())));
}

FileSum VerifiedFile::verify() {
  sync_file(descriptor_, temporary_.target());
  drop_cache(descriptor_);
  descriptor_.close();
  const FileSum written{bytes_, checksum_.value()};
  if (sum_of_file(temporary_.path()) != written) {
    throw UserError("what was read back differs from what was written", temporary_.target().string(),
                    "the disk or file system is damaged; choose another place");
  }
  is_verified_ = true;
  return written;
}

void VerifiedFile::commit() {
  check(is_verified_, "a file is verified before it takes its name");
  temporary_.commit();
}

}  // namespace longhalo

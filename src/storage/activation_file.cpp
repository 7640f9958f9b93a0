#include "storage/activation_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string>

#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "storage/hdf5.hpp"

namespace longhalo {
namespace fs = std::filesystem;
namespace {

std::string group_name(int layer) {
  char name[40];
  std::snprintf(name, sizeof name, "/step_state/layer_%03d", layer);
  return name;
}

int64_t chunks_of(int64_t bytes, int64_t chunk_bytes) {
  return (bytes + chunk_bytes - 1) / chunk_bytes;
}

int64_t whole_blocks(int64_t bytes) {
  return bytes / ActivationFile::kBlockBytes * ActivationFile::kBlockBytes;
}

// A limit on file sizes that HDF5 met when it closes the file would leave the library with a file that it can
// neither close nor forget; so it is met here, before HDF5 has the file.
void try_length(const fs::path& path, int64_t bytes) {
  const FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!file.is_open() || ::ftruncate(file.get(), bytes) != 0) throw_write_error(errno, path, bytes);
}

// Moves as many whole blocks of `bytes` as direct I/O takes, and returns how many bytes that were. A call
// that moves less than a block ends it: the file's end, a limit or a refusal, which buffered I/O then names.
template <class Call>
int64_t move_directly(int64_t bytes, const Call& call) {
  int64_t moved = 0;
  while (moved < bytes) {
    const ssize_t got = call(moved, static_cast<size_t>(bytes - moved));
    if (got < 0 && errno == EINTR) continue;
    const int64_t blocks = got < 0 ? 0 : whole_blocks(got);
    if (blocks == 0) break;
    moved += blocks;
  }
  return moved;
}

}  // namespace

ActivationFile::ActivationFile(const fs::path& path, const ActivationShape& shape, int64_t chunk_bytes,
                               DirectIo direct)
    : path_(path), total_bytes_(shape.total_bytes()) {
  check(chunk_bytes > 0 && chunk_bytes % kBlockBytes == 0, "a chunk is a multiple of 4096 bytes");
  require_space(path, total_bytes_);
  try {
    try_length(path, total_bytes_);
    lay_out(shape, chunk_bytes);
    reserve();
  } catch (...) {
    std::error_code ignored;
    fs::remove(path, ignored);
    throw;
  }
  if (direct == DirectIo::kNever) return;
  direct_ = FileDescriptor(::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC));
  is_direct_ = direct_.is_open();
  if (!is_direct_) log_info(text(path.string(), ": no direct I/O here; activations pass the page cache"));
}

void ActivationFile::lay_out(const ActivationShape& shape, int64_t chunk_bytes) {
  Hdf5File file = Hdf5File::create(path_, Hdf5File::Existing::kReplace, kBlockBytes);
  file.set_attribute("chunk_bytes", chunk_bytes);
  const Hdf5Type type = shape.type == ActivationType::kBfloat16 ? Hdf5Type::kUint16 : Hdf5Type::kFloat32;
  const int64_t chunks = chunks_of(shape.layer_bytes(), chunk_bytes);
  for (const int layer : shape.layers) {
    const std::string group = group_name(layer);
    Hdf5Dataset values = file.create_dataset(group + "/x", type, {shape.tokens, shape.hidden});
    values.set_attribute("dtype", activation_type_name(shape.type));
    Hdf5Dataset checksums = file.create_dataset(group + "/checksums", Hdf5Type::kUint64, {chunks});
    const Place place{values.file_offset(), checksums.file_offset()};
    check(chunks == 0 || (place.values >= 0 && place.checksums >= 0), "contiguous datasets have offsets");
    places_.push_back(place);
    values.close();
    checksums.close();
  }
  file.close();
}

void ActivationFile::reserve() {
  buffered_ = FileDescriptor(::open(path_.c_str(), O_RDWR | O_CLOEXEC));
  if (!buffered_.is_open()) throw_file_error(errno, "open", path_);
  struct stat status {};
  if (::fstat(buffered_.get(), &status) != 0) throw_file_error(errno, "inspect", path_);
  int error = EINTR;
  while (error == EINTR)
    error = ::posix_fallocate(buffered_.get(), 0, status.st_size);
  if (error != 0) throw_write_error(error, path_, status.st_size);
}

int64_t ActivationFile::direct_part(const Place& place, int64_t bytes) const {
  return is_direct_ && place.values % kBlockBytes == 0 ? whole_blocks(bytes) : 0;
}

void ActivationFile::write(int slot, int64_t offset, std::span<const std::byte> bytes) {
  const Place& place = places_[static_cast<size_t>(slot)];
  const int64_t at = place.values + offset;
  const int64_t direct = direct_part(place, static_cast<int64_t>(bytes.size()));
  const int64_t moved = move_directly(direct, [&](int64_t done, size_t count) {
    return ::pwrite(direct_.get(), bytes.data() + done, count, at + done);
  });
  write_exactly(buffered_, at + moved, bytes.subspan(static_cast<size_t>(moved)), path_, total_bytes_);
  // What direct I/O refused went through the page cache: a file system that opens files for it but cannot do
  // it. Asking it again for every chunk would be in vain.
  if (moved < direct) is_direct_ = false;
}

void ActivationFile::read(int slot, int64_t offset, std::span<std::byte> bytes) const {
  const Place& place = places_[static_cast<size_t>(slot)];
  const int64_t at = place.values + offset;
  const int64_t direct = direct_part(place, static_cast<int64_t>(bytes.size()));
  const int64_t moved = move_directly(direct, [&](int64_t done, size_t count) {
    return ::pread(direct_.get(), bytes.data() + done, count, at + done);
  });
  read_exactly(buffered_, at + moved, bytes.subspan(static_cast<size_t>(moved)), path_);
  if (moved < direct) is_direct_ = false;
}

void ActivationFile::write_checksums(int slot, std::span<const uint64_t> checksums) {
  if (checksums.empty()) return;
  write_exactly(buffered_, places_[static_cast<size_t>(slot)].checksums, std::as_bytes(checksums), path_,
                total_bytes_);
}

}  // namespace longhalo

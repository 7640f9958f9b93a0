// The HDF5 file of a DiskActivationStore: contiguous datasets /step_state/layer_000/x [n, D] (bfloat16 as
// uint16) and .../checksums [chunks], laid out and really reserved once, then rewritten in place. HDF5 has
// the file open only while it lays it out; afterwards nothing but the datasets' own bytes change, at offsets
// that HDF5 gave, so the file is valid at any moment and any reader may open it. Bulk bytes go by direct I/O
// where the file system takes it, past the page cache, which would only copy them and grow.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "storage/activation_store.hpp"
#include "storage/posix.hpp"

namespace longhalo {

enum class DirectIo { kWherePossible, kNever };

class ActivationFile {
 public:
  /// Offsets, and addresses of buffers, that direct I/O needs to be multiples of this.
  static constexpr int64_t kBlockBytes = 4096;

  /// Throws UserError with path, bytes needed and bytes free if the space cannot be reserved; no file is left
  /// then.
  ActivationFile(const std::filesystem::path& path, const ActivationShape& shape, int64_t chunk_bytes,
                 DirectIo direct);

  /// Bytes [offset, offset + size) of a layer. `offset` and the buffer's address are multiples of
  /// kBlockBytes; the size is one too, except at the layer's end. Safe from many threads. Throw UserError.
  void write(int slot, int64_t offset, std::span<const std::byte> bytes);
  void read(int slot, int64_t offset, std::span<std::byte> bytes) const;

  /// The layer's dataset of checksums, one a chunk.
  void write_checksums(int slot, std::span<const uint64_t> checksums);

  const std::filesystem::path& path() const { return path_; }
  bool is_direct() const { return is_direct_; }

 private:
  struct Place {
    int64_t values = -1;  // file offset of the first byte; -1 where there are none
    int64_t checksums = -1;
  };
  void lay_out(const ActivationShape& shape, int64_t chunk_bytes);
  void reserve();
  int64_t direct_part(const Place& place, int64_t bytes) const;

  std::filesystem::path path_;
  int64_t total_bytes_;
  std::vector<Place> places_;
  FileDescriptor buffered_;
  FileDescriptor direct_;
  mutable std::atomic<bool> is_direct_{false};
};

}  // namespace longhalo

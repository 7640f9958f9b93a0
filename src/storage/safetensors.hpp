// Weights of a Hugging Face model directory: model.safetensors, or model.safetensors.index.json and its
// shards. Files are memory-mapped read-only and their headers are checked in full against the file size
// before any tensor is handed out, so a damaged download is refused by name instead of becoming wrong numbers
// or a crash. Format: 8 bytes header length (little endian), JSON header, then the tensors' bytes without
// holes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "storage/mapped_file.hpp"
#include "storage/shape_text.hpp"

namespace longhalo {

enum class Dtype {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64
};

/// Name as the file writes it ("BF16"), and bytes of one element.
std::string_view dtype_name(Dtype dtype);
int64_t dtype_bytes(Dtype dtype);

/// One tensor inside a mapped file; valid as long as the SafetensorsFile (or ModelWeights) it came from.
struct TensorView {
  std::string name;
  std::string file;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // row-major; NOTE: not necessarily aligned for its type

  int64_t elements() const;
};

/// Writes the tensor as fp32 into `out`, whose size must be elements(). Exact for F32, BF16 and F16,
/// subnormals, infinities and NaN included. Throws UserError for any other dtype.
void copy_as_float(const TensorView& tensor, std::span<float> out);

/// Takes the tensor's pages out of this process's resident memory; reading it again brings them back from the
/// file.
void drop_pages(const TensorView& tensor);

class SafetensorsFile {
 public:
  /// Maps and checks the whole header. Throws UserError naming file, tensor and remedy.
  explicit SafetensorsFile(const std::filesystem::path& path);
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  bool contains(std::string_view name) const { return tensors_.find(name) != tensors_.end(); }
  std::vector<std::string> names() const;
  /// Throws UserError with the nearest name if there is no such tensor.
  const TensorView& view(std::string_view name) const;

 private:
  void read_header(std::span<const std::byte> file);

  std::filesystem::path path_;
  std::optional<MappedFile> mapping_;
  std::map<std::string, TensorView, std::less<>> tensors_;
};

class ModelWeights {
 public:
  /// Opens model.safetensors if there is one, else the index and every shard it names. Throws UserError also
  /// when the index names a missing shard or a tensor that its shard does not hold.
  explicit ModelWeights(const std::filesystem::path& directory);

  bool contains(std::string_view name) const { return owner_.find(name) != owner_.end(); }
  std::vector<std::string> names() const;
  /// Throws UserError with the nearest name if there is no such tensor.
  const TensorView& view(std::string_view name) const;
  /// view(), but throws UserError unless the shape is the one expected.
  const TensorView& view(std::string_view name, std::span<const int64_t> expected_shape) const;

 private:
  std::filesystem::path source_;  // the file that lists the tensors, for messages
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const SafetensorsFile*, std::less<>> owner_;
};

}  // namespace longhalo

// HDF5 files over the C API, with every return code checked and the library's own error text in the message.
// Datasets are contiguous and allocated when created: with chunked data, HDF5 1.10 on a full disk lets
// H5Dwrite and H5Fclose return success and leaves wrong numbers behind. Use Hdf5Writer (hdf5_writer.hpp) for
// output: it verifies what it wrote and publishes the file by a rename. hdf5.h is not included here:
// identifiers are its 64-bit hid_t.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/error.hpp"

namespace longhalo {

/// A file that could not be opened because it could not be locked; nothing is known of what is in it.
class Hdf5LockError : public UserError {
 public:
  using UserError::UserError;
};

enum class Hdf5Type { kUint8, kUint16, kUint32, kUint64, kInt32, kInt64, kFloat32, kFloat64 };

std::string_view hdf5_type_name(Hdf5Type type);
int64_t hdf5_type_bytes(Hdf5Type type);
/// "1.10.8", for the run log.
std::string hdf5_version();
/// Whether several threads may use the library at once.
bool hdf5_is_thread_safe();

template <class T>
constexpr Hdf5Type hdf5_type_of() {
  if constexpr (std::is_same_v<T, uint8_t>) return Hdf5Type::kUint8;
  if constexpr (std::is_same_v<T, uint16_t>) return Hdf5Type::kUint16;
  if constexpr (std::is_same_v<T, uint32_t>) return Hdf5Type::kUint32;
  if constexpr (std::is_same_v<T, uint64_t>) return Hdf5Type::kUint64;
  if constexpr (std::is_same_v<T, int32_t>) return Hdf5Type::kInt32;
  if constexpr (std::is_same_v<T, int64_t>) return Hdf5Type::kInt64;
  if constexpr (std::is_same_v<T, float>) return Hdf5Type::kFloat32;
  if constexpr (std::is_same_v<T, double>) return Hdf5Type::kFloat64;
}

/// Owns one HDF5 identifier of any kind.
class Hdf5Id {
 public:
  using Closer = int (*)(int64_t);
  Hdf5Id() = default;
  Hdf5Id(int64_t id, Closer closer) : id_(id), closer_(closer) {}
  ~Hdf5Id();  // ignores errors: writers call close()
  Hdf5Id(Hdf5Id&& other) noexcept;
  Hdf5Id& operator=(Hdf5Id&& other) noexcept;
  int64_t get() const { return id_; }
  /// False if the library reports an error.
  bool close();

 private:
  int64_t id_ = -1;
  Closer closer_ = nullptr;
};

/// A 1-D or 2-D array of a file. Rows are the first dimension; a row of a 1-D dataset is one value.
class Hdf5Dataset {
 public:
  const std::string& name() const { return name_; }
  Hdf5Type type() const { return type_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t rows() const { return shape_[0]; }
  int64_t row_values() const { return shape_.size() == 2 ? shape_[1] : 1; }
  /// Offset of the first byte in the file, -1 if the data is not contiguous or empty.
  int64_t file_offset() const;

  /// Throws UserError unless the dataset has this type and shape; -1 allows any length.
  void expect(Hdf5Type type, std::span<const int64_t> shape) const;

  /// Whole rows from `first_row`. T must be the stored type. Throw UserError, for write with bytes needed and
  /// free.
  template <class T>
  void write(int64_t first_row, std::span<const T> values) {
    write_rows(first_row, values.data(), static_cast<int64_t>(values.size()), hdf5_type_of<T>());
  }
  template <class T>
  void read(int64_t first_row, std::span<T> values) const {
    read_rows(first_row, values.data(), static_cast<int64_t>(values.size()), hdf5_type_of<T>());
  }

  /// Checksum64 of all values as they lie in memory, read in blocks of a few MB. Throws UserError.
  uint64_t checksum() const;

  /// A small fact beside the data. Throws UserError.
  void set_attribute(const std::string& key, std::string_view value);

  void close();  // throws UserError

 private:
  friend class Hdf5File;
  Hdf5Dataset(Hdf5Id id, std::filesystem::path file, std::string name);
  void write_rows(int64_t first_row, const void* data, int64_t values, Hdf5Type type);
  void read_rows(int64_t first_row, void* data, int64_t values, Hdf5Type type) const;
  Hdf5Id select(int64_t first_row, int64_t values, Hdf5Type type, Hdf5Id& memory_space) const;
  std::string where() const;

  Hdf5Id id_;
  std::filesystem::path file_;
  std::string name_;
  Hdf5Type type_ = Hdf5Type::kUint8;
  std::vector<int64_t> shape_;
};

class Hdf5File {
 public:
  enum class Existing { kReplace, kRefuse };  // kRefuse: nor is a link followed that stands there

  /// Makes a new file. Datasets of at least `alignment_bytes` begin at a multiple of it in the file.
  static Hdf5File create(const std::filesystem::path& path, Existing existing, int64_t alignment_bytes = 1);
  /// Opens an existing file for reading.
  static Hdf5File open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  bool contains(const std::string& name) const;
  /// Makes the groups on the way to "group/name" too.
  Hdf5Dataset create_dataset(const std::string& name, Hdf5Type type, const std::vector<int64_t>& shape);
  Hdf5Dataset dataset(const std::string& name) const;

  /// 1-D list of UTF-8 texts, stored as zero-padded fixed-length strings.
  void write_strings(const std::string& name, const std::vector<std::string>& values);
  std::vector<std::string> read_strings(const std::string& name) const;

  /// Attributes of the file. Readers throw UserError if the attribute is missing or of another kind.
  void set_attribute(const std::string& key, std::string_view value);
  void set_attribute(const std::string& key, int64_t value);
  void set_attribute(const std::string& key, double value);
  bool has_attribute(const std::string& key) const;
  std::string string_attribute(const std::string& key) const;
  int64_t int_attribute(const std::string& key) const;
  double float_attribute(const std::string& key) const;

  void flush();  // throws UserError
  /// Flushes and closes; throws UserError. The destructor closes without looking.
  void close();

 private:
  Hdf5File(Hdf5Id id, std::filesystem::path path) : id_(std::move(id)), path_(std::move(path)) {}
  Hdf5Id id_;
  std::filesystem::path path_;
};

}  // namespace longhalo

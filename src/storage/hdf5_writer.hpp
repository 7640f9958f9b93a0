// One HDF5 file that appears whole or not at all: space check -> temporary file -> preallocated datasets ->
// every return code checked -> flush, close, fsync -> read back and compare checksums -> rename.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "storage/atomic_file.hpp"
#include "storage/checksum.hpp"
#include "storage/hdf5.hpp"

namespace longhalo {

class Hdf5Writer {
 public:
  /// `bytes_needed`: the data to come, checked against the free space now. Throws UserError.
  Hdf5Writer(const std::filesystem::path& target, int64_t bytes_needed);

  /// For attributes and string lists.
  Hdf5File& file() { return file_; }

  /// Reserves a dataset's space on the disk, so that a full disk is found here. Throws UserError.
  void create(const std::string& name, Hdf5Type type, const std::vector<int64_t>& shape);

  /// Writes the next whole rows of a created dataset.
  template <class T>
  void append(const std::string& name, std::span<const T> values) {
    Output& output = output_of(name);
    output.dataset.write(output.rows_written, values);
    output.checksum.update_values(values);
    output.rows_written += rows_in(output, static_cast<int64_t>(values.size()));
  }

  /// create() and append() of a whole array.
  template <class T>
  void write(const std::string& name, const std::vector<int64_t>& shape, std::span<const T> values) {
    create(name, hdf5_type_of<T>(), shape);
    append(name, values);
  }

  /// Flushes, closes, syncs and reads everything back. The file is complete but still under its temporary
  /// name.
  void verify();
  /// verify() unless done, then the rename.
  void commit() { commit_to(temporary_.target()); }
  /// The same to another place on the same file system.
  void commit_to(const std::filesystem::path& place);

 private:
  struct Output {
    Hdf5Dataset dataset;
    int64_t rows_written = 0;
    Checksum64 checksum;
  };
  Output& output_of(const std::string& name);
  static int64_t rows_in(const Output& output, int64_t values);
  void read_back() const;

  TemporaryFile temporary_;  // before file_: removed only after the file is closed
  Hdf5File file_;
  int64_t bytes_needed_;
  std::map<std::string, Output> outputs_;
  bool verified_ = false;
};

}  // namespace longhalo

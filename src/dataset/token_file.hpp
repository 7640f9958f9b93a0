// Token data in HDF5, written once and read by every later job:
//   tokens            uint16 [T] if vocabulary_size <= 65536, else uint32 [T]: all documents, one after
//   another document_offsets  int64 [documents + 1]: document i is tokens[offsets[i], offsets[i + 1])
//   document_names    UTF-8 [documents]
//   attributes        format "longhalo tokens 1", vocabulary_size, tokenizer, tokenizer_sha256
// Neither side ever holds more than one document in memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "storage/atomic_file.hpp"
#include "storage/hdf5.hpp"
#include "storage/posix.hpp"

namespace longhalo {

struct TokenFileInfo {
  int64_t vocabulary_size = 0;   // ids are below it
  std::string tokenizer;         // name of the model or tokenizer file, for people
  std::string tokenizer_sha256;  // of tokenizer.json or tokenizer.model
};

class TokenFileWriter {
 public:
  /// Tokens go to a spool beside `target` until commit(), because HDF5 can only preallocate a known length;
  /// the disk needs room for them twice. Throws UserError.
  TokenFileWriter(const std::filesystem::path& target, TokenFileInfo info);

  /// Throws UserError for an id outside [0, vocabulary_size) and when the disk is full.
  void append_document(const std::string& name, std::span<const int32_t> tokens);

  int64_t tokens() const { return offsets_.back(); }

  /// Writes, verifies and publishes the file; until then an older file at the target stays.
  void commit();

 private:
  template <class Stored>
  void spool(std::span<const int32_t> tokens);
  template <class Stored>
  void copy_spool_to(class Hdf5Writer& writer);

  std::filesystem::path target_;
  TokenFileInfo info_;
  TemporaryFile spool_name_;
  FileDescriptor spool_;
  std::vector<int64_t> offsets_{0};
  std::vector<std::string> names_;
};

class TokenFile {
 public:
  /// Opens and checks everything but the ids, which are checked as they are read. Throws UserError, also for
  /// a file that the HDF5 library would crash on: a child process reads it first (storage/trial_read.hpp).
  explicit TokenFile(const std::filesystem::path& file);

  const TokenFileInfo& info() const { return info_; }
  int64_t documents() const { return static_cast<int64_t>(names_.size()); }
  const std::string& document_name(int64_t document) const;
  int64_t document_tokens(int64_t document) const;

  /// Tokens [first, first + out.size()) of a document, so that a rank reads only its own shard. Throws
  /// UserError naming document and position if an id is not below vocabulary_size.
  void read(int64_t document, int64_t first, std::span<int32_t> out) const;
  std::vector<int32_t> read(int64_t document) const;

 private:
  struct AfterTrial {};
  TokenFile(const std::filesystem::path& file, AfterTrial);
  static const std::filesystem::path& tried(const std::filesystem::path& file);
  template <class Stored>
  void read_as(int64_t begin, std::span<int32_t> out) const;

  Hdf5File file_;
  Hdf5Dataset tokens_;
  TokenFileInfo info_;
  std::vector<int64_t> offsets_;
  std::vector<std::string> names_;
};

}  // namespace longhalo

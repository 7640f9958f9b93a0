// Job checkpoints that a kill at any moment cannot spoil. Every rank writes its parts into
// checkpoints/step_000123/: temporary file -> flush, close, fsync -> read back, compare checksums -> rename
// -> fsync the folder; then all ranks agree; then rank 0 writes the manifest, which is the commit; only then
// are old checkpoints removed. Parts are written by a thread while the job goes on, at most one checkpoint at
// a time; what needs all ranks is done in start() and commit(), on the caller's thread.
//
// A folder holds model.safetensors (or its shards and index) and small files such as config.json, so that
// transformers opens it; optimizer_00001_of_00004.h5 and so on; and manifest.json.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "storage/checkpoint_manifest.hpp"
#include "storage/folder_lock.hpp"
#include "storage/optimizer_state.hpp"
#include "storage/rank_agreement.hpp"
#include "storage/safetensors_writer.hpp"

namespace longhalo {

/// One checkpoint, seen from one rank. What spans point to stays as it is until commit() returns or throws
/// (of the weights, what tensors_written_here() says).
struct CheckpointContents {
  int64_t step = 0;
  /// The whole model, the same list on every rank; files of it are written by different ranks.
  std::vector<NamedTensor> weights;
  /// This rank's part of the optimizer's state.
  std::vector<OptimizerSlice> optimizer;
  /// Small files by name (config.json, tokenizer.json); those of rank 0 count.
  std::vector<std::pair<std::string, std::string>> files;
  nlohmann::json job_state;   // counters, data position; that of rank 0 counts
  nlohmann::json rank_state;  // this rank's own: random numbers
};

/// Which rank writes a file of weights, by its place in the list of all: the ranks take turns.
int writer_of_weight_file(size_t index, int ranks);
/// Bytes of tensors of the files that the rank with the most of them writes.
int64_t most_weight_bytes_of_a_rank(std::span<const NamedTensor> weights, int ranks, int64_t max_file_bytes);

struct CheckpointOptions {
  int keep = 2;  // at least 2: the newest may turn out damaged
  int64_t max_weight_file_bytes = 5'000'000'000;
  /// Called after every step of the order with its name, on whichever thread takes it: for tests that end
  /// the process there.
  std::function<void(std::string_view)> observe = [](std::string_view) {};
};

class CheckpointWriter {
 public:
  /// Makes the folder, keeps other jobs out of it and removes what dead jobs left half-written. Collective;
  /// all ranks name the same folder. Throws on all ranks.
  CheckpointWriter(std::filesystem::path directory, RankAgreement ranks, CheckpointOptions options = {});
  /// Waits for the thread; a checkpoint without commit() stays uncommitted.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Checks the space (those that are kept stay until the new one is there) and begins to write in the
  /// background. Collective; the one before is committed. Throws on all ranks.
  void start(CheckpointContents contents);
  /// Indices of those of the model's tensors that start() would write on this rank: the bytes of the others
  /// need not stay as they are.
  std::vector<size_t> tensors_written_here(std::span<const NamedTensor> weights) const;
  bool is_started() const { return contents_.has_value(); }
  /// Whether this rank's parts are written or have failed: commit() will not wait for this rank.
  bool is_written() const { return is_written_; }
  /// Waits for all ranks' parts, commits, prunes; returns the checkpoint's folder. Collective. Throws on all
  /// ranks what went wrong on any; the checkpoints before stay, and another start() may follow.
  std::filesystem::path commit();

 private:
  bool writes_weight_file(size_t index) const {
    return writer_of_weight_file(index, ranks_.ranks) == ranks_.rank;
  }
  void write_parts();
  void write_weights();
  void finish(VerifiedFile& file, const std::string& name);
  void write_manifest(const std::vector<std::string>& reports);
  void abandon();

  std::filesystem::path directory_;
  RankAgreement ranks_;
  CheckpointOptions options_;
  std::optional<FolderLock> lock_;  // rank 0's; a link may make it the folder of several outputs

  std::optional<CheckpointContents> contents_;
  std::filesystem::path folder_;
  std::vector<ManifestPart> parts_;
  std::exception_ptr error_;
  std::atomic<bool> is_written_{false};
  std::thread thread_;
};

}  // namespace longhalo

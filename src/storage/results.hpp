// What an inference job leaves behind: results.jsonl, one JSON record a (document, query, task), and
// arrays/<document>.h5 with its scores and embeddings. Rank 0 writes. Three promises:
// - a job killed at any moment, or stopped by a full disk, leaves only whole records, each with its arrays;
// - old results are not touched before the first new record is ready;
// - two jobs cannot write into one folder at once.
// results.jsonl is rewritten beside itself and renamed; to keep that cheap a record waits (in memory) until
// the last rewrite is ten times its own duration ago, so a killed job may lose the last few finished records,
// never a part.
#pragma once

#include <compare>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/clock.hpp"
#include "storage/checksum.hpp"
#include "storage/folder_lock.hpp"
#include "storage/posix.hpp"
#include "storage/result_arrays.hpp"

namespace longhalo {

/// What to do where results.jsonl exists already.
enum class IfResultsExist {
  kError,    // refuse
  kResume,   // keep its records and add those that are missing
  kReplace,  // start anew; the old results are moved aside at the first new record and removed by finish()
};

/// What one record is about. `query` is empty for tasks without one.
struct ResultKey {
  std::string document;
  std::string query;
  std::string task;
  auto operator<=>(const ResultKey&) const = default;

  /// From the record's keys "document", "query" (missing or null: empty) and "task".
  static ResultKey of(const nlohmann::json& record);
};

class ResultWriter {
 public:
  /// Makes the folder if it is missing, proves that it can be written, takes its lock and reads the records
  /// that are there. Throws UserError: folder not writable, a file in its place, another job at work, results
  /// there and kError, or (kResume) a line that is no record.
  /// `settings` says of each document of this job what its results depend on beside query and task (a
  /// fingerprint). Its records get it, and kResume refuses records of other settings: two kinds of results
  /// would mix unseen. Documents, named as_read_back(), that are not in it are not judged. `tasks` are those
  /// of this job: what others left in arrays is not looked at, as this job would not make it again.
  using Settings = std::map<std::string, std::string>;
  using Tasks = std::set<std::string>;
  ResultWriter(const std::filesystem::path& directory, IfResultsExist if_exist, Settings settings = {},
               Tasks tasks = {"score", "embed"});
  /// Writes waiting records if that is possible, drops the lock; reports failure to the log only.
  ~ResultWriter();
  ResultWriter(const ResultWriter&) = delete;
  ResultWriter& operator=(const ResultWriter&) = delete;

  /// Keys of the records kept from an earlier job (empty unless kResume).
  const std::set<ResultKey>& recorded() const { return recorded_; }
  /// Those of them whose arrays are gone, damaged or another document's, which is logged once: not among the
  /// recorded(), for they are to be made again. They stay in the file until write() brings new ones.
  const std::set<ResultKey>& lost() const { return lost_; }

  /// Throws UserError where what stands in the folder already keeps records, or the arrays of
  /// `documents_with_arrays`, from their places, or (kReplace) cannot be moved aside: to be said before the
  /// work that they come from.
  void require_places(const std::vector<std::string>& documents_with_arrays) const;

  /// Writes the arrays of a document, whole or not at all (replacing those of an earlier call for it), and
  /// returns the file's path relative to the folder ("arrays/name-3f0c...h5"), to be put into its records.
  /// Call before write(). Throws UserError.
  std::string write_arrays(std::string_view document, const DocumentArrays& arrays);

  /// Adds the records of a document; each must have "document" and "task". They reach the disk together, at
  /// once unless documents follow each other so fast that rewriting would cost more than the time between
  /// them. Throws UserError; the records before them stay.
  void write(const std::vector<nlohmann::json>& records);
  void write(const nlohmann::json& record) { write(std::vector<nlohmann::json>(1, record)); }

  /// Writes all waiting records and removes what kReplace moved aside. Throws UserError.
  void finish();

 private:
  void probe();
  void require_way_aside() const;
  void read_existing();
  void drop_replaced();
  [[noreturn]] void refuse_changes() const;
  void move_old_results_aside();
  void flush();
  void copy_committed(const FileDescriptor& to, const std::filesystem::path& file, int64_t bytes_needed);

  std::filesystem::path directory_;
  Settings settings_;
  Tasks tasks_;
  std::filesystem::path records_file_;
  std::optional<FolderLock> lock_;
  std::set<ResultKey> recorded_, lost_, replaced_;
  bool move_aside_ = false;       // old results have to be moved before the first new ones appear
  bool remove_previous_ = false;  // what was moved aside is superseded once this job is done
  bool failed_ = false;           // do not try again in the destructor
  int64_t committed_bytes_ = 0;   // length and checksum of results.jsonl as this job last wrote or found it
  Checksum64 committed_;
  std::string waiting_;
  Stopwatch since_flush_;
  double flush_seconds_ = 0;
};

}  // namespace longhalo

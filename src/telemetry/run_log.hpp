// The job's machine-readable log: one JSON object a line, each line written by one write() to a file opened
// for appending, so that lines never mix and a killed job leaves whole lines. The first record of every run
// is its header: what ran, with which settings, on what. A requeued job appends to the same file. Every
// record gets "event" and "seconds" (since the run's start) in front of the caller's own keys.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/clock.hpp"

namespace longhalo {

/// What the header says. The caller fills it, because this room knows neither MPI nor HDF5.
struct RunHeader {
  std::string command;    // "infer"
  nlohmann::json config;  // effective
  std::vector<std::pair<std::string, std::string>>
      versions;  // {"longhalo", "0.1.0"}, {"mpi", ...}, {"hdf5", ...}
  int ranks = 1;
  std::vector<std::string> hosts;                   // one for each rank, in rank order
  nlohmann::json extra = nlohmann::json::object();  // further keys: transport, devices, ...
};

class RunLog {
 public:
  /// Throws UserError where a RunLog in `file` could not be; makes nothing.
  static void require_usable(const std::filesystem::path& file);
  /// Opens or creates `file` and writes the header. Throws UserError if the file cannot be written.
  RunLog(const std::filesystem::path& file, const RunHeader& header);
  /// Writes nothing to any file: for ranks other than 0 and jobs without a log.
  RunLog() = default;
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  /// Appends {"event": event, "seconds": ..., fields...}. If the disk is full the half line is taken back, a
  /// warning is given once and the job goes on: a lost log line is no reason to lose the job. A file that was
  /// removed meanwhile is made anew.
  void write(std::string_view event, const nlohmann::json& fields = nlohmann::json::object());

 private:
  bool append(const std::string& line);
  void open_again_if_removed();

  std::string file_;
  int descriptor_ = -1;
  bool warned_ = false;
  Stopwatch watch_;
};

/// "g++ 12.2.0" or "clang 14.0.6"; local time as "2026-01-31T12:03:44+0100".
std::string compiler_version();
std::string local_time_text();

}  // namespace longhalo

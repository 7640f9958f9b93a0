// Progress of one long task, written by rank 0 to standard error: a bar that redraws itself on a terminal,
// plain lines (the first, one every few seconds, the last) in a batch log. Safe to call from several threads,
// and cheap enough to call for every tile: most calls only add to a counter.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "core/clock.hpp"

namespace longhalo {

enum class ProgressStyle { kAuto, kBar, kLines, kOff };
enum class ProgressUnit { kTokens, kBytes, kSteps, kLayers, kDocuments };

struct ProgressOptions {
  ProgressStyle style = ProgressStyle::kAuto;  // kAuto: a bar if the descriptor is a terminal, else lines
  double seconds_between_lines = 5;
  double seconds_between_redraws = 0.1;
  int descriptor = 2;
};

class Progress {
 public:
  /// total < 0: not known, so no percentage and no time left.
  Progress(std::string label, int64_t total, ProgressUnit unit, ProgressOptions options = {});
  /// Calls finish().
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void add(int64_t count) { update(done_.fetch_add(count) + count); }
  void set(int64_t done) {
    done_ = done;
    update(done);
  }
  /// Writes the last state, once.
  void finish() noexcept;

 private:
  void update(int64_t done);
  void draw(int64_t done, double seconds, bool last);

  const std::string label_;
  const int64_t total_;
  const ProgressUnit unit_;
  ProgressOptions options_;
  std::atomic<int64_t> done_{0};
  std::atomic<double> next_draw_seconds_{0};
  std::mutex drawing_;
  bool finished_ = false;
  Stopwatch watch_;
};

/// "1.05M tokens", "3.20 MB", "17 steps"; bytes in powers of 1000.
std::string quantity_text(double count, ProgressUnit unit);
/// "4.2s", "3m07s", "2h05m".
std::string duration_text(double seconds);
/// The words of a progress line without its bar: "prefill 52% 0.54M/1.05M tokens, 8.1k tokens/s, 1m03s left".
std::string progress_text(const std::string& label, int64_t done, int64_t total, ProgressUnit unit,
                          double seconds, bool last);

}  // namespace longhalo

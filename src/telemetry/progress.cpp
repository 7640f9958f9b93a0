#include "telemetry/progress.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "core/text.hpp"

namespace longhalo {
namespace {

int terminal_columns(int descriptor) {
  winsize size{};
  if (::ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

// A progress line that cannot be written is no reason to stop a job.
void put(int descriptor, const std::string& line) {
  [[maybe_unused]] const ssize_t written = ::write(descriptor, line.data(), line.size());
}

std::string scaled(double count) {
  constexpr std::array<const char*, 6> kSuffix{"", "k", "M", "G", "T", "P"};
  size_t step = 0;
  // 999.5 and more would print as 1000: move on to the next suffix.
  while (std::abs(count) >= (step == 0 ? 1000 : 999.5) && step + 1 < kSuffix.size()) {
    count /= 1000;
    ++step;
  }
  char digits[32];
  if (count > 0 && count < 0.95) {  // a slow rate
    std::snprintf(digits, sizeof digits, "%.2g", count);
    return digits;
  }
  const int decimals = step == 0       ? (count == std::floor(count) ? 0 : 1)
                       : count < 9.995 ? 2
                       : count < 99.95 ? 1
                                       : 0;
  std::snprintf(digits, sizeof digits, "%.*f", decimals, count);
  return text(digits, kSuffix[step]);
}

const char* unit_name(ProgressUnit unit) {
  switch (unit) {
    case ProgressUnit::kTokens:
      return " tokens";
    case ProgressUnit::kBytes:
      return "B";
    case ProgressUnit::kSteps:
      return " steps";
    case ProgressUnit::kLayers:
      return " layers";
    case ProgressUnit::kDocuments:
      break;
  }
  return " documents";
}

}  // namespace

std::string quantity_text(double count, ProgressUnit unit) {
  return scaled(count) + unit_name(unit);
}

std::string duration_text(double seconds) {
  if (!(seconds < 1e9)) return "?";
  char digits[48];
  const auto whole = static_cast<long long>(std::llround(seconds));
  if (seconds < 59.95) {
    std::snprintf(digits, sizeof digits, "%.1fs", seconds);
  } else if (whole < 3600) {
    std::snprintf(digits, sizeof digits, "%lldm%02llds", whole / 60, whole % 60);
  } else {
    std::snprintf(digits, sizeof digits, "%lldh%02lldm", whole / 3600, whole % 3600 / 60);
  }
  return digits;
}

std::string progress_text(const std::string& label, int64_t done, int64_t total, ProgressUnit unit,
                          double seconds, bool last) {
  std::string line = label;
  const double rate = seconds > 0 ? static_cast<double>(done) / seconds : 0;
  if (total > 0) line += text(" ", std::clamp<int64_t>(done * 100.0 / total, 0, 100), "%");
  line += text(" ", scaled(static_cast<double>(done)));
  if (total >= 0) line += text("/", scaled(static_cast<double>(total)));
  line += unit_name(unit);
  if (done > 0 && seconds > 0) line += text(", ", quantity_text(rate, unit), "/s");
  if (last) {
    line += text(", ", duration_text(seconds));
  } else if (total > done && done > 0 && rate > 0) {
    line += text(", ", duration_text(static_cast<double>(total - done) / rate), " left");
  }
  return line;
}

Progress::Progress(std::string label, int64_t total, ProgressUnit unit, ProgressOptions options)
    : label_(std::move(label)), total_(total), unit_(unit), options_(options) {
  if (options_.style == ProgressStyle::kAuto) {
    options_.style = ::isatty(options_.descriptor) != 0 ? ProgressStyle::kBar : ProgressStyle::kLines;
  }
  update(0);
}

Progress::~Progress() {
  finish();
}

void Progress::update(int64_t done) {
  if (options_.style == ProgressStyle::kOff) return;
  const double now = watch_.seconds();
  if (now < next_draw_seconds_.load(std::memory_order_relaxed)) return;
  // A thread that finds another one drawing has nothing to add.
  const std::unique_lock lock(drawing_, std::try_to_lock);
  if (!lock.owns_lock() || finished_ || now < next_draw_seconds_.load()) return;
  draw(done, now, false);
  next_draw_seconds_ = now + (options_.style == ProgressStyle::kBar ? options_.seconds_between_redraws
                                                                    : options_.seconds_between_lines);
}

void Progress::finish() noexcept {
  if (options_.style == ProgressStyle::kOff) return;
  try {
    const std::lock_guard lock(drawing_);
    if (finished_) return;
    finished_ = true;
    draw(done_.load(), watch_.seconds(), true);
  } catch (...) {  // out of memory for a line of text: the job itself will notice
  }
}

void Progress::draw(int64_t done, double seconds, bool last) {
  std::string line = progress_text(label_, done, total_, unit_, seconds, last);
  if (options_.style == ProgressStyle::kLines) return put(options_.descriptor, line + "\n");
  // One column stays free: a full line would make some terminals scroll.
  const auto columns = static_cast<size_t>(std::max(terminal_columns(options_.descriptor) - 1, 1));
  if (total_ > 0 && line.size() + 14 <= columns) {
    const size_t room = std::min<size_t>(columns - line.size() - 3, 40);
    const double part = std::clamp(static_cast<double>(done) / static_cast<double>(total_), 0.0, 1.0);
    const auto filled = static_cast<size_t>(part * static_cast<double>(room));
    line = text("[", std::string(filled, '#'), std::string(room - filled, '.'), "] ", line);
  }
  if (line.size() > columns) line.resize(columns);
  put(options_.descriptor, text("\r\x1b[K", line, last ? "\n" : ""));
}

}  // namespace longhalo

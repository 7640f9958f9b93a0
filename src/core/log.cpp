#include "core/log.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <iostream>
#include <string>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

std::atomic<int> log_rank{-1};
std::atomic<LogLevel> log_level{LogLevel::kInfo};

// Messages name what stands in files from elsewhere, such as a shard in the index of a model: to a terminal
// an escape among it would be an order.
std::string printable(std::string_view message) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string result;
  result.reserve(message.size());
  for (const char letter : message) {
    const auto byte = static_cast<unsigned char>(letter);
    if ((byte >= 0x20 && byte != 0x7f) || letter == '\n' || letter == '\t') {
      result += letter;
    } else {
      result += "\\x";
      result += kDigits[byte >> 4U];
      result += kDigits[byte & 0xfU];
    }
  }
  return result;
}

void write_line(LogLevel level, std::string_view tag, std::string_view message) {
  if (level < log_level.load()) return;
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char clock[16];
  std::strftime(clock, sizeof clock, "%H:%M:%S", &local);
  const int rank = log_rank.load();
  const std::string who = rank < 0 ? std::string("longhalo") : text("longhalo[rank ", rank, "]");
  const std::string line = text(clock, " ", who, tag, " ", printable(message), "\n");
  // One write a line, so that lines of several ranks never mix. A log that cannot be written is not an error.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace

void set_log_rank(int rank) {
  log_rank = rank;
}
void set_log_level(LogLevel level) {
  log_level = level;
}
void log_info(std::string_view message) {
  write_line(LogLevel::kInfo, ":", message);
}
void log_warning(std::string_view message) {
  write_line(LogLevel::kWarning, " warning:", message);
}
void log_error(std::string_view message) {
  write_line(LogLevel::kError, " error:", message);
}

void print_text(std::string_view text) {
  if (!(std::cout << text << std::flush))
    throw UserError("standard output cannot be written", "the output of this command",
                    "free space where it is directed to, or direct it elsewhere");
}

void claim_standard_streams() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) != -1) continue;
    // The lowest free number is taken, which is this one: those before it are open.
    [[maybe_unused]] const int opened = ::open("/dev/null", O_RDWR);
  }
}

}  // namespace longhalo

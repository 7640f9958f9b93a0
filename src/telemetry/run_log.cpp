#include "telemetry/run_log.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>
#include <string_view>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/log.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

using nlohmann::ordered_json;

// Text from outside (paths, generated text) may hold bytes that are no UTF-8; a log line must not fail for
// that.
std::string line_of(const ordered_json& record) {
  return record.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

[[noreturn]] void cannot_open(int error, const std::string& file) {
  throw UserError(text("the run log cannot be opened for writing: ", std::strerror(error)), file,
                  "name a file in an existing folder that this user may write to");
}

// A document that was named as the log by mistake shall not lose its last line, and not gain ours. A pipe
// that nobody reads would stop the job when it is full.
void refuse_other_files(int descriptor, const std::string& file) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) return;
  if (S_ISFIFO(status.st_mode))
    throw UserError("a pipe cannot hold the run log", file, "name a file for the log (run.log)");
  if (!S_ISREG(status.st_mode)) return;
  constexpr std::string_view kBegin = R"({"event":)";
  std::array<char, kBegin.size()> bytes{};
  const ssize_t got = ::pread(descriptor, bytes.data(), bytes.size(), 0);
  if (got < 0 || kBegin.starts_with(std::string_view(bytes.data(), static_cast<size_t>(got)))) return;
  throw UserError("this file is there already and is no log of longhalo", file,
                  "name another file for the log (run.log), or remove this one");
}

// A run that was killed by an older kernel or a full disk may have left half a line: the next run starts a
// new one.
void cut_half_line(int descriptor, const std::string& file) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) return;
  constexpr off_t kBlock = 4096;
  char block[kBlock];
  for (off_t end = status.st_size; end > 0;) {
    const off_t begin = std::max<off_t>(end - kBlock, 0);
    const ssize_t got = ::pread(descriptor, block, static_cast<size_t>(end - begin), begin);
    if (got != end - begin) return;
    const void* const newline = ::memrchr(block, '\n', static_cast<size_t>(got));
    const off_t keep = newline == nullptr ? begin : begin + (static_cast<const char*>(newline) - block) + 1;
    if (newline == nullptr && begin > 0) {
      end = begin;
      continue;
    }
    if (keep < status.st_size && ::ftruncate(descriptor, keep) == 0) {
      log_warning(text(file, " ended in half a line of an earlier run; it was cut off"));
    }
    return;
  }
}

}  // namespace

void RunLog::require_usable(const std::filesystem::path& file) {
  refuse_shared_link(file);
  const int descriptor = ::open(file.c_str(), O_RDWR | O_APPEND | O_CLOEXEC);
  if (descriptor >= 0) {
    try {
      refuse_other_files(descriptor, file.string());
    } catch (const UserError&) {
      ::close(descriptor);
      throw;
    }
    ::close(descriptor);
    return;
  }
  if (errno != ENOENT) cannot_open(errno, file.string());
  // It would be made.
  const std::filesystem::path folder = end_of_links(file).parent_path() / ".";
  if (::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) != 0) cannot_open(errno, file.string());
}

RunLog::RunLog(const std::filesystem::path& file, const RunHeader& header) : file_(file.string()) {
  refuse_shared_link(file);
  descriptor_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (descriptor_ < 0) cannot_open(errno, file_);
  try {
    refuse_other_files(descriptor_, file_);
  } catch (const UserError&) {
    ::close(descriptor_);
    throw;
  }
  cut_half_line(descriptor_, file_);
  ordered_json record;
  record["event"] = "run";
  record["seconds"] = 0.0;
  record["command"] = header.command;
  record["started"] = local_time_text();
  ordered_json& versions = record["versions"] = ordered_json::object();
  for (const auto& [name, version] : header.versions)
    versions[name] = version;
  versions["compiler"] = compiler_version();
  record["ranks"] = header.ranks;
  record["hosts"] = header.hosts;
  for (const auto& [key, value] : header.extra.items())
    record[key] = value;
  record["config"] = header.config;
  if (!append(line_of(record))) {
    const int error = errno;
    ::close(descriptor_);
    throw UserError(text("the run log cannot be written: ", std::strerror(error)), file_,
                    "free space on this file system, or choose another place");
  }
}

RunLog::~RunLog() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void RunLog::write(std::string_view event, const nlohmann::json& fields) {
  if (descriptor_ < 0) return;
  ordered_json record;
  record["event"] = event;
  record["seconds"] = std::round(watch_.seconds() * 1e6) / 1e6;
  for (const auto& [key, value] : fields.items())
    record[key] = value;
  open_again_if_removed();
  if (append(line_of(record)) || warned_) return;
  log_warning(
      text("the run log ", file_, " cannot be written (", std::strerror(errno), "); its lines are lost"));
  warned_ = true;
}

// What is written to a file without a name nobody will read.
void RunLog::open_again_if_removed() {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0 || status.st_nlink > 0) return;
  const int again = ::open(file_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (again >= 0) {
    ::close(descriptor_);
    descriptor_ = again;
  }
  if (!warned_ || again >= 0)
    log_warning(text("the run log ", file_, " was removed; its lines so far are lost",
                     again >= 0 ? ", those to come go into a new one" : ", and so are those to come"));
  warned_ = again < 0;
}

bool RunLog::append(const std::string& line) {
  const off_t before = ::lseek(descriptor_, 0, SEEK_END);
  ssize_t put = -1;
  do {
    put = ::write(descriptor_, line.data(), line.size());
  } while (put < 0 && errno == EINTR);
  if (put == static_cast<ssize_t>(line.size())) return true;
  if (put >= 0) {
    [[maybe_unused]] const int cut = ::ftruncate(descriptor_, before);
    errno = ENOSPC;
  }
  return false;
}

std::string compiler_version() {
#if defined(__clang__)
  return text("clang ", __clang_major__, ".", __clang_minor__, ".", __clang_patchlevel__);
#else
  return text("g++ ", __GNUC__, ".", __GNUC_MINOR__, ".", __GNUC_PATCHLEVEL__);
#endif
}

std::string local_time_text() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char digits[40];
  std::strftime(digits, sizeof digits, "%Y-%m-%dT%H:%M:%S%z", &local);
  return digits;
}

}  // namespace longhalo

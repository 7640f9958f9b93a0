#include "core/file_access.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "core/clock.hpp"
#include "core/error.hpp"
#include "core/json_depth.hpp"
#include "core/log.hpp"
#include "core/stop_request.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace fs = std::filesystem;
namespace {

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

[[noreturn]] void cannot_read(int error, const fs::path& file) {
  throw UserError(text("the file cannot be read: ", std::strerror(error)), file.string(),
                  "check that it exists and that you may read it" +
                      (error == ENOENT ? start_of_relative(file) : std::string()));
}

// What stands in the way of a folder; where nothing does, what the system said.
std::string hindrance(const fs::path& directory, const std::error_code& said) {
  fs::path part;
  for (const fs::path& name : directory) {
    part /= name;
    std::error_code error;
    const fs::file_status status = fs::status(part, error);
    const bool is_link = fs::is_symlink(part, error);
    if (status.type() == fs::file_type::directory) continue;
    if (status.type() == fs::file_type::none) break;  // barred
    if (is_link && fs::exists(status)) return text(part.string(), " is a link to what is no folder");
    if (is_link) return text(part.string(), " is a link that leads nowhere");
    if (!fs::exists(status)) break;
    return part == directory ? "a file of that name is in its place" : part.string() + " is no folder";
  }
  return said.message();
}

[[noreturn]] void cannot_make(const fs::path& directory, std::string_view what, std::string_view remedy,
                              const std::error_code& said) {
  throw UserError(text(what, " cannot be made: ", hindrance(directory, said)), directory.string(), remedy);
}

bool everybody_may_write(const fs::path& folder) {
  struct stat status {};
  return ::stat(folder.empty() ? "." : folder.c_str(), &status) == 0 && (status.st_mode & S_IWOTH) != 0;
}

}  // namespace

std::string start_of_relative(const fs::path& path) {
  std::error_code error;
  const fs::path start = fs::current_path(error);
  if (path.is_absolute() || error) return {};
  return text("; this relative path starts at ", start.string());
}

std::string read_text_file(const fs::path& file, int64_t most_bytes) {
  // O_NONBLOCK: opening a pipe must not wait for its writer. It has no effect on regular files.
  const Descriptor in(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (in.number() < 0 || ::fstat(in.number(), &status) != 0) cannot_read(errno, file);
  if (S_ISDIR(status.st_mode)) cannot_read(EISDIR, file);
  if (!S_ISREG(status.st_mode))
    throw UserError("this is a device, pipe or socket, not a regular file", file.string(),
                    "put the file itself there");
  if (status.st_size > most_bytes)
    throw UserError(
        text("the file has ", status.st_size, " bytes; ", most_bytes, " are the most that make sense"),
        file.string(), "check that it is the right file");
  std::string contents(static_cast<size_t>(status.st_size), '\0');
  for (size_t at = 0; at < contents.size();) {
    constexpr size_t kMostAtOnce = size_t{1} << 30;
    const ssize_t got = ::pread(in.number(), contents.data() + at,
                                std::min(kMostAtOnce, contents.size() - at), static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) cannot_read(errno, file);
    if (got == 0)
      throw UserError("the file was shortened while it was read", file.string(),
                      "start again when it is complete");
    at += static_cast<size_t>(got);
  }
  return contents;
}

std::string read_stream(const fs::path& file, int64_t most_bytes,
                        const std::function<bool()>& asked_to_stop) {
  constexpr double kPatienceSeconds = 2;
  constexpr int kBetweenLooksMilliseconds = 100;
  // NOTE: with O_NONBLOCK neither this nor read() waits for a pipe's writer. poll() does: a pipe that nobody
  // has opened for writing yet is not at its end.
  const Descriptor in(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (in.number() < 0) cannot_read(errno, file);
  std::string contents(static_cast<size_t>(most_bytes), '\0');
  size_t size = 0;
  const Stopwatch watch;
  for (bool is_said = false; size < contents.size();) {
    pollfd state{in.number(), POLLIN, 0};
    if (::poll(&state, 1, kBetweenLooksMilliseconds) <= 0) {
      if (asked_to_stop && asked_to_stop())
        throw StopRequest(
            text("stopped on request while waiting for ", file.string(), "; nothing was begun"));
      if (!is_said && watch.seconds() > kPatienceSeconds) {
        is_said = true;
        log_info(text("waiting for what somebody is to write into ", file.string()));
      }
      continue;
    }
    const ssize_t got = ::read(in.number(), contents.data() + size, contents.size() - size);
    if (got < 0 && errno != EINTR && errno != EAGAIN) cannot_read(errno, file);
    if (got == 0) break;
    if (got > 0) size += static_cast<size_t>(got);
  }
  contents.resize(size);
  return contents;
}

std::string read_json_text(const fs::path& file, int64_t most_bytes) {
  std::string contents = read_text_file(file, most_bytes);
  if (json_depth(contents) > kMostJsonDepth)
    throw UserError(text("its brackets are nested more than ", kMostJsonDepth, " deep"), file.string(),
                    "check that it is the right file");
  return contents;
}

void refuse_shared_link(const fs::path& path) {
  fs::path folder, part;
  for (const fs::path& name : path) {
    folder = part;
    part /= name;
    struct stat status {};
    if (::lstat(part.c_str(), &status) != 0) return;
    if (!S_ISLNK(status.st_mode) || !everybody_may_write(folder)) continue;
    throw UserError(text("this is a link in ", folder.empty() ? fs::path(".").string() : folder.string(),
                         ", a folder that everybody may write to; nothing is written through such a link"),
                    part.string(), "name the place that it leads to, or remove the link");
  }
}

void require_folder(const fs::path& folder, std::string_view what, std::string_view remedy) {
  // The dot: a file does not do.
  if (::faccessat(AT_FDCWD, (folder / ".").c_str(), X_OK, AT_EACCESS) == 0) return;
  const int error = errno;
  throw UserError(text(what, " cannot be opened: ", std::strerror(error)), folder.string(),
                  text(remedy, error == ENOENT ? start_of_relative(folder) : ""));
}

void make_directory(const fs::path& directory, std::string_view what, std::string_view remedy) {
  refuse_shared_link(directory);
  std::error_code error, ignored;
  fs::create_directories(directory, error);
  if (!fs::is_directory(directory, ignored)) cannot_make(directory, what, remedy, error);
}

void require_makeable_directory(const fs::path& directory, std::string_view what, std::string_view remedy) {
  refuse_shared_link(directory);
  std::error_code ignored;
  if (fs::is_directory(directory, ignored)) return;
  fs::path there = fs::absolute(directory, ignored);
  while (!fs::exists(fs::symlink_status(there, ignored)) && there.has_relative_path())
    there = there.parent_path();
  // Of a name of its own: what others make there meanwhile is not in its way.
  std::string trial = (there / ".longhalo-trial.XXXXXX").string();
  if (::mkdtemp(trial.data()) == nullptr)
    cannot_make(directory, what, remedy, std::error_code(errno, std::generic_category()));
  ::rmdir(trial.c_str());
}

fs::path end_of_links(fs::path path) {
  constexpr int kMostLinks = 40;
  std::error_code error;
  for (int i = 0; i < kMostLinks && fs::is_symlink(path, error); ++i) {
    if (fs::exists(path, error)) break;
    path = path.parent_path() / fs::read_symlink(path, error);
  }
  return path;
}

}  // namespace longhalo

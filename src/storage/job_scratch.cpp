#include "storage/job_scratch.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.hpp"
#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "storage/folder_lock.hpp"

namespace longhalo {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kPrefix = "longhalo-activations@";
constexpr std::string_view kLockName = "alive";
constexpr double kPatienceSeconds = 60;

constexpr std::string_view kWhat = "the folder for activations";
constexpr std::string_view kRemedy = "set activations.directory to a folder on node-local scratch";

// A name that cannot lead elsewhere or be taken for another field.
std::string plain(std::string_view name) {
  std::string result;
  for (const char letter : name) {
    const bool kept = (letter >= '0' && letter <= '9') || (letter >= 'a' && letter <= 'z') ||
                      (letter >= 'A' && letter <= 'Z') || letter == '-' || letter == '.';
    result += kept ? letter : '_';
  }
  return result;
}

// Making a folder and locking it takes two calls; while another process looks for dead folders it must not
// see one between them. Holds nothing where the file system knows no locks. Every user has a lock of his own:
// he could not remove the folders of others anyway. The file goes with the lock.
class DirectoryLock {
 public:
  explicit DirectoryLock(const fs::path& directory)
      : file_(directory / text(".longhalo-activations.", ::geteuid(), ".lock")) {
    const Stopwatch waited;
    // One that is locked, but was removed by its holder before, is not the one that others find.
    do {
      lock_ = open_lock_file(file_, 0600);
      wait_for_lock(waited);
    } while (is_held_ && !is_in_place() && waited.seconds() < kPatienceSeconds);
  }
  ~DirectoryLock() {
    if (is_held_) ::unlink(file_.c_str());
  }
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;
  bool is_held() const { return is_held_; }

 private:
  void wait_for_lock(const Stopwatch& waited) {
    while (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) {
        log_warning(text(file_.string(), " cannot be locked: ", std::strerror(errno),
                         "; folders that killed jobs leave there will have to be removed by hand"));
        return;
      }
      if (waited.seconds() > kPatienceSeconds) {
        throw UserError(text("another process has held this lock for ", kPatienceSeconds, " seconds"),
                        file_.string(),
                        "end the process that holds it (fuser shows which), or choose another folder");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    is_held_ = true;
  }
  bool is_in_place() const {
    struct stat ours {};
    struct stat current {};
    return ::fstat(lock_.get(), &ours) == 0 && ::lstat(file_.c_str(), &current) == 0 &&
           ours.st_ino == current.st_ino && ours.st_dev == current.st_dev;
  }

  fs::path file_;
  FileDescriptor lock_;
  bool is_held_ = false;
};

bool is_dead(const fs::path& folder) {
  struct stat status {};
  if (::lstat(folder.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) || status.st_uid != ::geteuid()) {
    return false;
  }
  const FileDescriptor lock(::open((folder / kLockName).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  // Without its lock file it was left half made or half removed.
  if (!lock.is_open()) return errno == ENOENT;
  return ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0;
}

// The lock file goes last, so that a removal which is interrupted goes on next time.
bool remove_folder(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> contents;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename() != kLockName) contents.push_back(entry->path());
  }
  for (const fs::path& path : contents)
    fs::remove_all(path, error);
  fs::remove_all(folder, error);
  return !error;
}

void remove_dead(const fs::path& directory) {
  const std::string ours = text(kPrefix, plain(host_name()), "@");
  std::error_code error;
  std::vector<fs::path> dead;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename().string().starts_with(ours) && is_dead(entry->path())) {
      dead.push_back(entry->path());
    }
  }
  for (const fs::path& folder : dead) {
    if (remove_folder(folder)) {
      log_info(text("removed ", folder.string(), ", which a job that is gone had left"));
    } else {
      log_warning(text(folder.string(), " was left by a job that is gone and cannot be removed"));
    }
  }
}

}  // namespace

JobScratch::JobScratch(const fs::path& directory, std::string_view job, int rank) {
  static std::atomic<int> counter{0};
  make_directory(directory, kWhat, kRemedy);
  const DirectoryLock directory_lock(directory);
  if (directory_lock.is_held()) remove_dead(directory);
  path_ = directory /
          text(kPrefix, plain(host_name()), "@", plain(job), "@rank", rank, "@", ::getpid(), "-", counter++);
  if (::mkdir(path_.c_str(), 0700) != 0) throw_file_error(errno, "make", path_);
  const fs::path file = path_ / kLockName;
  alive_ = FileDescriptor(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  const int error = alive_.is_open() ? 0 : errno;
  if (error != 0) {
    ::rmdir(path_.c_str());
    throw_write_error(error, file, 4096);
  }
  // Where locks are not known, DirectoryLock has said so; nobody else can take ours for dead there.
  ::flock(alive_.get(), LOCK_EX | LOCK_NB);
}

void JobScratch::require_usable(const fs::path& directory, DeadFolders dead) {
  require_makeable_directory(directory, kWhat, kRemedy);
  std::error_code ignored;
  if (!fs::is_directory(directory, ignored)) return;
  const DirectoryLock lock(directory);
  if (lock.is_held() && dead == DeadFolders::kRemove) remove_dead(directory);
}

JobScratch::~JobScratch() {
  if (!remove_folder(path_)) log_warning(text(path_.string(), " could not be removed"));
}

}  // namespace longhalo

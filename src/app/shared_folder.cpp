#include "app/shared_folder.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "core/clock.hpp"
#include "core/text.hpp"
#include "storage/posix.hpp"

namespace longhalo {
namespace fs = std::filesystem;
namespace {

constexpr double kPatienceSeconds = 5;  // a network file system shows a new file a little later
constexpr size_t kNamed = 8;

}  // namespace

fs::path nearest_existing(fs::path folder) {
  std::error_code ignored;
  folder = fs::absolute(folder, ignored);
  while (!fs::exists(fs::symlink_status(folder, ignored)) && folder.has_relative_path())
    folder = folder.parent_path();
  return folder;
}

std::optional<SharedFolder> look_at_shared_folder(const MpiSession& session, const fs::path& folder) {
  std::string name;
  FileDescriptor file;
  if (session.is_root()) {
    // A relative path may lead elsewhere from where other ranks were started.
    std::error_code ignored;
    const fs::path there = fs::is_directory(folder, ignored) ? folder : nearest_existing(folder);
    const fs::path path = there / text(".longhalo-seen.", host_name(), '.', ::getpid());
    file = FileDescriptor(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file.is_open()) name = path.string();
  }
  name = broadcast_text(session, name);
  if (name.empty()) return std::nullopt;
  bool seen = false;
  const Stopwatch watch;
  do {
    struct stat status {};
    seen = ::stat(name.c_str(), &status) == 0;
    if (!seen) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  } while (!seen && watch.seconds() < kPatienceSeconds);
  const std::vector<std::string> answers = gather_text(session, seen ? "" : session.host());
  if (!session.is_root()) return std::nullopt;
  ::unlink(name.c_str());
  std::vector<std::string> blind;
  for (const std::string& host : answers)
    if (!host.empty() && std::find(blind.begin(), blind.end(), host) == blind.end()) blind.push_back(host);
  if (blind.empty()) return SharedFolder{};
  std::string fault =
      text(blind.size(), blind.size() == 1 ? " host does" : " hosts do", " not see what rank 0 writes:");
  for (size_t i = 0; i < std::min(blind.size(), kNamed); ++i)
    fault += text(' ', blind[i]);
  return SharedFolder{
      fault,
      "set output.directory to a folder of a shared file system; /tmp and /dev/shm are private to a host"};
}

}  // namespace longhalo

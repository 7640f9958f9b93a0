// What the tests of files share: a folder that goes away, a disk of one megabyte, a limit on file sizes, and
// a check that a fault is a UserError which says what a user needs.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/error.hpp"

namespace longhalo::testing {

class ScratchFolder {
 public:
  ScratchFolder() {
    std::string name = std::filesystem::temp_directory_path() / "longhalo_test.XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no scratch folder: " + name);
    path_ = name;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

// A file system of 1 MiB, visible to this process alone. reason() says why there is none (the tests then
// skip).
class TinyDisk {
 public:
  TinyDisk() {
    // Within a mount namespace of our own, nothing is left mounted even if the test is killed.
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
      reason_ = std::string("a small file system cannot be mounted here: ") + std::strerror(errno);
    }
  }
  ~TinyDisk() {
    if (reason_.empty()) ::umount2(folder_.path().c_str(), MNT_DETACH);
  }
  const std::string& reason() const { return reason_; }
  const std::filesystem::path& path() const { return folder_.path(); }
  std::filesystem::path operator/(std::string_view name) const { return folder_.path() / name; }

 private:
  ScratchFolder folder_;
  std::string reason_;
};

// Where the tests run as root, who may do anything anywhere, the rights of a user without any while this
// lives.
class AsNobody {
 public:
  static constexpr uid_t kUser = 65534;
  AsNobody() : was_root_(::geteuid() == 0) {
    if (was_root_ && ::seteuid(kUser) != 0) throw std::runtime_error("no rights are given up");
  }
  ~AsNobody() { EXPECT_TRUE(!was_root_ || ::seteuid(0) == 0) << std::strerror(errno); }
  AsNobody(const AsNobody&) = delete;
  AsNobody& operator=(const AsNobody&) = delete;

 private:
  bool was_root_;
};

// No file may grow beyond `bytes` while this lives: the same faults as a full disk, without a mount.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    previous_signal_ = ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &previous_);
    const rlimit limit{bytes, previous_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &previous_);
    ::signal(SIGXFSZ, previous_signal_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit previous_{};
  void (*previous_signal_)(int) = SIG_DFL;
};

inline void write_text(const std::filesystem::path& file, std::string_view contents) {
  std::ofstream(file, std::ios::binary).write(contents.data(), static_cast<std::streamsize>(contents.size()));
}

inline std::string read_text(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline int count_files(const std::filesystem::path& directory) {
  int count = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory))
    count += entry.is_regular_file();
  return count;
}

// Runs `action`, which has to throw a UserError whose text has all `words` and a remedy; returns the text.
inline std::string expect_user_error(const std::function<void()>& action,
                                     std::initializer_list<std::string_view> words) {
  try {
    action();
  } catch (const UserError& error) {
    const std::string message = error.what();
    for (const std::string_view word : words) {
      EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is missing in:\n" << message;
    }
    EXPECT_NE(message.find("remedy: "), std::string::npos) << message;
    return message;
  }
  ADD_FAILURE() << "no UserError; expected one with '" << (words.size() == 0 ? "" : *words.begin()) << "'";
  return {};
}

}  // namespace longhalo::testing

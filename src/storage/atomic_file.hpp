// Files that appear whole or not at all: write <target>.tmp.<host>.<process>-<n> -> fsync -> verify -> rename
// -> fsync the folder. Until the rename, whatever stood at the target is untouched, so a full disk or a kill
// at any moment leaves the previous file. What a killed process left behind is removed by
// remove_abandoned_temporaries().
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace longhalo {

/// The name of a temporary file beside its target. The destructor removes the file unless commit() was
/// called.
class TemporaryFile {
 public:
  /// Chooses the name; creates nothing. The target's folder has to exist. Throws UserError where a device,
  /// pipe or socket is in the target's place, or the way there leads through a link that anybody could have
  /// made.
  explicit TemporaryFile(std::filesystem::path target);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  const std::filesystem::path& target() const { return target_; }

  /// Forces the finished temporary file to the disk. Throws UserError.
  void sync() const;
  /// Renames it to the target and forces the folder to the disk. Throws UserError.
  void commit() { commit_to(target_); }
  /// The same to another place on the same file system.
  void commit_to(const std::filesystem::path& place);

 private:
  std::filesystem::path target_;
  std::filesystem::path path_;
  bool committed_ = false;
};

/// Replaces `target` by `contents`, reading the new file back before the rename. Throws UserError.
void write_file_atomically(const std::filesystem::path& target, std::span<const std::byte> contents);
void write_file_atomically(const std::filesystem::path& target, std::string_view contents);

/// Throws UserError where no file could be put at `target`: to be said before the work whose result goes
/// there. Empty is no file, and no fault.
void require_replaceable(const std::filesystem::path& target);

/// Throws UserError if something stands at `path` that this user may not take away: another user's file or
/// folder in a sticky folder, one that is mounted there, or marked as immutable. Takes nothing away, and does
/// not look at what a folder holds.
void require_removable(const std::filesystem::path& path);

/// Where `target` comes to lie if its links stay links: at the end of them, whether a file is there yet or
/// not. Throws UserError as TemporaryFile() does, and for a link that anybody could have made.
std::filesystem::path end_of_trusted_links(const std::filesystem::path& target);

/// Which temporaries count as abandoned.
enum class Abandoned {
  kWriterGone,  // of this host whose process is gone, or of another host and untouched for a day
  kAll          // all: only for a caller that holds a lock on the folder
};

/// Removes abandoned temporaries directly inside `directory`; returns how many. Never throws: what cannot be
/// removed stays and does no harm.
int remove_abandoned_temporaries(const std::filesystem::path& directory, Abandoned which);

}  // namespace longhalo

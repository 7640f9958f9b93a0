#include "storage/checkpoint_list.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>

#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kPrefix = "step_";
constexpr std::string_view kReplaced = ".replaced_";
constexpr const char* kDamagedNote = "damaged.txt";
constexpr size_t kDigits = 6;

std::optional<int64_t> number(std::string_view digits) {
  int64_t value = 0;
  const char* const end = digits.data() + digits.size();
  const auto [stopped, error] = std::from_chars(digits.data(), end, value);
  if (error != std::errc{} || stopped != end || digits.empty() || digits[0] == '-') return std::nullopt;
  return value;
}

// The step of a folder's name; nothing for folders that are not ours.
std::optional<int64_t> step_of(const fs::path& folder) {
  const std::string name = folder.filename().string();
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::string_view rest = std::string_view(name).substr(kPrefix.size());
  if (const size_t mark = rest.find(kReplaced); mark != std::string_view::npos) {
    if (!number(rest.substr(mark + kReplaced.size()))) return std::nullopt;
    rest = rest.substr(0, mark);
  }
  return rest.size() < kDigits ? std::nullopt : number(rest);
}

struct Folder {
  fs::path path;
  int64_t step;
};

std::vector<Folder> folders_in(const fs::path& directory, std::error_code& error) {
  std::vector<Folder> result;
  std::error_code ignored;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    const std::optional<int64_t> step = step_of(entry->path());
    if (step && entry->is_directory(ignored) && !entry->is_symlink(ignored)) {
      result.push_back({entry->path(), *step});
    }
  }
  return result;
}

bool has_manifest(const fs::path& folder) {
  std::error_code error;
  // What cannot be looked at counts as there: it is not ours to remove.
  return fs::exists(folder / kManifestName, error) || error;
}

bool remove_folder(const fs::path& folder) {
  std::error_code error;
  // Manifest first: a removal that is interrupted leaves no checkpoint that looks whole.
  fs::remove(folder / kManifestName, error);
  if (error) return false;
  try {
    sync_directory(folder);
  } catch (const UserError&) {
    return false;
  }
  fs::remove_all(folder, error);
  return !error;
}

// Every part there with its size: a look that costs nothing. Checksums are compared when it is restored.
bool looks_whole(const StoredCheckpoint& checkpoint) {
  if (!checkpoint.manifest || checkpoint.is_marked_damaged) return false;
  const std::vector<ManifestPart>& parts = checkpoint.manifest->parts;
  return std::all_of(parts.begin(), parts.end(), [&](const ManifestPart& part) {
    std::error_code error;
    const uintmax_t bytes = fs::file_size(checkpoint.folder / part.file, error);
    return !error && bytes == static_cast<uintmax_t>(part.sum.bytes);
  });
}

}  // namespace

std::string checkpoint_name(int64_t step) {
  char name[40];
  std::snprintf(name, sizeof name, "step_%06lld", static_cast<long long>(step));
  return name;
}

std::vector<StoredCheckpoint> list_checkpoints(const fs::path& directory) {
  std::error_code error;
  const std::vector<Folder> folders = folders_in(directory, error);
  if (error && error != std::errc::no_such_file_or_directory) {
    throw_file_error(error.value(), "look for checkpoints in", directory);
  }
  std::vector<StoredCheckpoint> result;
  for (const Folder& folder : folders) {
    if (!has_manifest(folder.path)) continue;
    StoredCheckpoint checkpoint{folder.path, folder.step, {}, {}, false};
    checkpoint.is_marked_damaged = fs::exists(folder.path / kDamagedNote, error);
    try {
      checkpoint.manifest = read_manifest(folder.path);
    } catch (const UserError& fault) {
      checkpoint.fault = fault.what();
    }
    result.push_back(std::move(checkpoint));
  }
  const auto order = [](const StoredCheckpoint& checkpoint) {
    return std::pair(checkpoint.manifest ? checkpoint.manifest->sequence : INT64_MAX, checkpoint.step);
  };
  std::sort(result.begin(), result.end(), [&](const auto& a, const auto& b) { return order(a) > order(b); });
  return result;
}

void mark_damaged(const fs::path& folder, const std::string& reason) {
  try {
    write_file_atomically(folder / kDamagedNote, reason + "\n");
  } catch (const std::exception& error) {
    log_warning(text("the damaged checkpoint cannot be marked: ", error.what()));
  }
}

void unmark_damaged(const fs::path& folder) {
  std::error_code ignored;
  fs::remove(folder / kDamagedNote, ignored);
}

void remove_uncommitted(const fs::path& directory) {
  std::error_code error;
  for (const Folder& folder : folders_in(directory, error)) {
    if (has_manifest(folder.path)) continue;
    std::error_code failed;
    fs::remove_all(folder.path, failed);
    log_info(text(folder.path.string(), failed ? " cannot be removed, though it is" : " removed:",
                  " a checkpoint that was never finished"));
  }
}

void remove_checkpoints(const fs::path& directory) {
  for (const StoredCheckpoint& checkpoint : list_checkpoints(directory)) {
    if (remove_folder(checkpoint.folder)) continue;
    throw UserError("an old checkpoint cannot be removed", checkpoint.folder.string(),
                    "remove it by hand, or choose another output.directory");
  }
}

void make_way(const fs::path& folder) {
  std::error_code error;
  if (!fs::exists(folder, error)) return;
  if (!has_manifest(folder)) {
    fs::remove_all(folder, error);
    if (error) throw_file_error(error.value(), "remove", folder);
    return;
  }
  for (int count = 1;; ++count) {
    const fs::path aside = folder.string() + text(kReplaced, count);
    if (fs::exists(aside, error)) continue;
    fs::rename(folder, aside, error);
    if (error) throw_file_error(error.value(), "move aside", folder);
    sync_directory(folder.parent_path());
    return;
  }
}

void prune_checkpoints(const fs::path& directory, int keep) {
  try {
    const std::vector<StoredCheckpoint> all = list_checkpoints(directory);
    if (std::count_if(all.begin(), all.end(), looks_whole) < keep) return;
    int kept = 0;
    for (const StoredCheckpoint& checkpoint : all) {
      if (looks_whole(checkpoint) && kept++ < keep) continue;
      if (!remove_folder(checkpoint.folder)) {
        log_warning(text(checkpoint.folder.string(), " is no longer needed but cannot be removed"));
      }
    }
  } catch (const std::exception& error) {
    log_warning(text("old checkpoints stay: ", error.what()));
  }
}

}  // namespace longhalo

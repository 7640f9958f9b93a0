// The folders of a job's checkpoints: checkpoints/step_000123/, and step_000123.replaced_<n> for one whose
// step is being written again. A folder counts once it has a manifest; what has none was left half-written by
// a job that is gone, or half-removed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "storage/checkpoint_manifest.hpp"

namespace longhalo {

std::string checkpoint_name(int64_t step);

struct StoredCheckpoint {
  std::filesystem::path folder;
  int64_t step = 0;
  std::optional<CheckpointManifest> manifest;  // nothing where it cannot be read
  std::string fault;                           // why not
  bool is_marked_damaged = false;
};

/// All that have a manifest, those that cannot be read first, then the last written first. Throws UserError
/// if the folder cannot be read; a missing one is empty.
std::vector<StoredCheckpoint> list_checkpoints(const std::filesystem::path& directory);

/// Leaves or takes away a note in the folder that a part of it is damaged: such a checkpoint is not counted
/// among those that are kept. Never throws.
void mark_damaged(const std::filesystem::path& folder, const std::string& reason);
void unmark_damaged(const std::filesystem::path& folder);

/// Removes folders without manifest. The caller holds the folder's lock. Never throws.
void remove_uncommitted(const std::filesystem::path& directory);

/// Removes all, each manifest first. The caller holds the folder's lock. Throws UserError naming the first
/// that cannot be removed.
void remove_checkpoints(const std::filesystem::path& directory);

/// Makes way for a checkpoint of this step: an uncommitted one is removed, a committed one gets another name.
/// Throws UserError.
void make_way(const std::filesystem::path& folder);

/// Keeps the `keep` last written whole checkpoints and removes all others, each manifest first. Does nothing
/// while there are fewer. Never throws: what cannot be removed is logged.
void prune_checkpoints(const std::filesystem::path& directory, int keep);

}  // namespace longhalo

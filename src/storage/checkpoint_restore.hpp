// Finds the checkpoint to go on from: the last written one whose every part has its size and checksum; where
// it is damaged the one before, with the reason said.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "storage/checkpoint_manifest.hpp"
#include "storage/optimizer_state.hpp"
#include "storage/rank_agreement.hpp"

namespace longhalo {

struct RestoredCheckpoint {
  std::filesystem::path folder;
  CheckpointManifest manifest;
  std::vector<std::string> skipped;  // newer ones: name and why they cannot be used

  OptimizerStateReader optimizer() const { return {folder, manifest.optimizer_parts()}; }
};

/// Nothing if there is no checkpoint. Parts are verified by different ranks, all agree. Damaged ones are
/// logged and marked. Collective. Throws UserError on all ranks if there are checkpoints and none verifies:
/// to start from the beginning is then for the user to say.
std::optional<RestoredCheckpoint> find_checkpoint(const std::filesystem::path& directory,
                                                  const RankAgreement& ranks);

}  // namespace longhalo

#include "storage/checkpoint_restore.hpp"

#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "storage/checkpoint_list.hpp"

namespace longhalo {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

// Reads the manifest and verifies this rank's share of the parts; returns what is wrong, or nothing.
std::string fault_seen_here(const fs::path& folder, const RankAgreement& ranks,
                            CheckpointManifest& manifest) {
  try {
    manifest = read_manifest(folder);
    const OptimizerStateReader reader(folder, manifest.optimizer_parts());  // throws when they do not fit
    for (size_t i = 0; i < manifest.parts.size(); ++i) {
      if (i % static_cast<size_t>(ranks.ranks) == static_cast<size_t>(ranks.rank)) {
        verify_part(folder, manifest.parts[i]);
      }
    }
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

std::optional<RestoredCheckpoint> find_checkpoint(const fs::path& directory, const RankAgreement& ranks) {
  json names = json::array();
  ranks.together([&] {
    if (!ranks.is_root()) return;
    for (const StoredCheckpoint& stored : list_checkpoints(directory))
      names.push_back(stored.folder.filename().string());
  });
  names = json::parse(ranks.broadcast(names.dump()));
  RestoredCheckpoint result;
  for (const json& name : names) {
    result.folder = directory / name.get<std::string>();
    std::string fault;
    for (const std::string& seen : ranks.gather(fault_seen_here(result.folder, ranks, result.manifest))) {
      if (fault.empty()) fault = seen;
    }
    fault = ranks.broadcast(fault);
    if (fault.empty()) {
      if (ranks.is_root()) unmark_damaged(result.folder);
      return result;
    }
    result.skipped.push_back(text(name.get<std::string>(), ": ", fault));
    if (ranks.is_root()) {
      log_warning(text("checkpoint ", name.get<std::string>(), " cannot be used: ", fault));
      mark_damaged(result.folder, fault);
    }
  }
  if (result.skipped.empty()) return std::nullopt;
  std::string what = "no checkpoint in this folder can be used";
  for (const std::string& skipped : result.skipped)
    what += "\n  " + skipped;
  ranks.together([&] {
    throw UserError(what, directory.string(),
                    "bring back a whole checkpoint from a copy, or choose an empty folder to start anew");
  });
  return std::nullopt;  // not reached: what throws on one rank throws on all
}

}  // namespace longhalo

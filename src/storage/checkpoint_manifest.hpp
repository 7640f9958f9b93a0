// manifest.json of a job checkpoint: what the checkpoint is made of, with sizes and checksums, and the small
// state that needs no file of its own. It is written last; a folder without it is no checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "storage/optimizer_state.hpp"
#include "storage/verified_file.hpp"

namespace longhalo {

inline constexpr const char* kManifestName = "manifest.json";

struct ManifestPart {
  std::string file;  // a plain name in the checkpoint's folder
  FileSum sum;
  std::vector<StateRange> ranges;  // of an optimizer part; empty for other files
};

struct CheckpointManifest {
  int64_t step = 0;
  int64_t sequence = 0;  // of writing; a job that went back to an earlier step writes higher ones again
  int ranks = 1;
  std::vector<ManifestPart> parts;
  nlohmann::json job_state;                 // counters, data position: the same for all ranks
  std::vector<nlohmann::json> rank_states;  // by rank (random numbers)

  std::vector<OptimizerPart> optimizer_parts() const;
};

nlohmann::json part_to_json(const ManifestPart& part);
/// Throws nlohmann's exception or UserError for what is no part.
ManifestPart part_from_json(const nlohmann::json& value);

/// The file's contents, with a checksum of themselves.
std::string manifest_text(const CheckpointManifest& manifest);
/// Reads <folder>/manifest.json. Throws UserError if it is missing, damaged or of another format.
CheckpointManifest read_manifest(const std::filesystem::path& folder);

/// Throws UserError unless the part is there with its size and checksum.
void verify_part(const std::filesystem::path& folder, const ManifestPart& part);

}  // namespace longhalo

#include "storage/checkpoint_manifest.hpp"

#include <charconv>
#include <cstdio>

#include "core/error.hpp"
#include "core/json_depth.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

constexpr const char* kFormat = "longhalo-checkpoint-1";
constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;
constexpr std::string_view kRemedy = "use another checkpoint, or make this file whole again from a copy";

std::string hex(uint64_t value) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(value));
  return digits;
}

uint64_t from_hex(const std::string& digits) {
  uint64_t value = 0;
  const char* const end = digits.data() + digits.size();
  const auto [stopped, error] = std::from_chars(digits.data(), end, value, 16);
  if (error != std::errc{} || stopped != end || digits.size() != 16) {
    throw UserError(text("'", digits, "' is no checksum"), kManifestName, kRemedy);
  }
  return value;
}

std::string checksum_of(const json& contents) {
  Checksum64 checksum;
  const std::string stored = contents.dump();
  checksum.update(std::as_bytes(std::span(stored.data(), stored.size())));
  return hex(checksum.value());
}

CheckpointManifest parsed(const std::string& contents) {
  if (json_depth(contents) > kMostJsonDepth)
    throw UserError("it is nested too deeply", kManifestName, kRemedy);
  json stored = json::parse(contents);
  const auto stated = stored.at("checksum").get<std::string>();
  if (stored.at("format").get<std::string>() != kFormat) {
    throw UserError(text("its format is '", stored.at("format").get<std::string>(), "', not '", kFormat, "'"),
                    kManifestName, "use the version of LongHalo that wrote it");
  }
  stored.erase("checksum");
  if (checksum_of(stored) != stated) {
    throw UserError("its checksum is not that of its contents", kManifestName, kRemedy);
  }
  CheckpointManifest manifest;
  manifest.step = stored.at("step").get<int64_t>();
  manifest.sequence = stored.at("sequence").get<int64_t>();
  manifest.ranks = stored.at("ranks").get<int>();
  for (const json& part : stored.at("parts"))
    manifest.parts.push_back(part_from_json(part));
  manifest.job_state = stored.at("job_state");
  for (const json& state : stored.at("rank_states"))
    manifest.rank_states.push_back(state);
  return manifest;
}

}  // namespace

std::vector<OptimizerPart> CheckpointManifest::optimizer_parts() const {
  std::vector<OptimizerPart> result;
  for (const ManifestPart& part : parts) {
    if (!part.ranges.empty()) result.push_back({part.file, part.ranges});
  }
  return result;
}

json part_to_json(const ManifestPart& part) {
  json value{{"file", part.file}, {"bytes", part.sum.bytes}, {"checksum", hex(part.sum.checksum)}};
  for (const StateRange& range : part.ranges) {
    value["optimizer"].push_back(
        {{"group", range.group}, {"begin", range.begin}, {"end", range.end}, {"total", range.total}});
  }
  return value;
}

ManifestPart part_from_json(const json& value) {
  ManifestPart part;
  part.file = value.at("file").get<std::string>();
  if (part.file.empty() || part.file == "." || part.file == ".." ||
      part.file.find('/') != std::string::npos) {
    throw UserError(text("its part '", part.file, "' is not a plain file name"), kManifestName, kRemedy);
  }
  part.sum = {value.at("bytes").get<int64_t>(), from_hex(value.at("checksum").get<std::string>())};
  if (!value.contains("optimizer")) return part;
  for (const json& range : value.at("optimizer")) {
    part.ranges.push_back({range.at("group").get<std::string>(), range.at("begin").get<int64_t>(),
                           range.at("end").get<int64_t>(), range.at("total").get<int64_t>()});
  }
  return part;
}

std::string manifest_text(const CheckpointManifest& manifest) {
  json stored{{"format", kFormat},
              {"step", manifest.step},
              {"sequence", manifest.sequence},
              {"ranks", manifest.ranks},
              {"parts", json::array()},
              {"job_state", manifest.job_state},
              {"rank_states", manifest.rank_states}};
  for (const ManifestPart& part : manifest.parts)
    stored["parts"].push_back(part_to_json(part));
  // Of what a reader will parse: a number that JSON cannot hold (NaN) becomes null on the way.
  stored["checksum"] = checksum_of(json::parse(stored.dump()));
  return stored.dump(2) + "\n";
}

CheckpointManifest read_manifest(const fs::path& folder) {
  const fs::path file = folder / kManifestName;
  const InputFile input = open_input(file);
  if (input.size_bytes > kMaxManifestBytes) {
    throw UserError(text("it has ", input.size_bytes, " bytes, far too many"), file.string(), kRemedy);
  }
  std::string contents(static_cast<size_t>(input.size_bytes), '\0');
  read_exactly(input.descriptor, 0, std::as_writable_bytes(std::span(contents)), file);
  try {
    return parsed(contents);
  } catch (const json::exception& error) {
    throw UserError(text("it is not a manifest (", error.what(), ")"), file.string(), kRemedy);
  } catch (const UserError& error) {
    throw UserError(text("it is damaged: ", error.what()), file.string(), kRemedy);
  }
}

void verify_part(const fs::path& folder, const ManifestPart& part) {
  const fs::path file = folder / part.file;
  const int64_t bytes = open_input(file).size_bytes;
  if (bytes != part.sum.bytes) {
    throw UserError(text("it has ", bytes, " bytes where the manifest says ", part.sum.bytes), file.string(),
                    kRemedy);
  }
  if (sum_of_file(file) != part.sum) {
    throw UserError("its checksum is not the one in the manifest", file.string(), kRemedy);
  }
}

}  // namespace longhalo

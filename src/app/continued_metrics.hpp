// metrics.jsonl of a job that goes on from a checkpoint: what was recorded of later steps is taken back,
// because those steps are done again.
#pragma once

#include <cstdint>
#include <filesystem>

namespace longhalo {

/// Drops the records whose "step" is later than `step`, and lines that are no record (the last one of a
/// killed job may be half a line). The file is replaced as a whole; a missing one is left missing. Throws
/// UserError.
void take_back_metrics(const std::filesystem::path& file, int64_t step);

}  // namespace longhalo

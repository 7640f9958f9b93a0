// The JSON report of a benchmark or of the doctor, which takes the place of an earlier report, and of nothing
// else: a config, a document or a model's file that was named by mistake stays.
#pragma once

#include <filesystem>
#include <string_view>

namespace longhalo {

/// Throws UserError where no report may be put at `file`: nothing can be written there, or what stands there
/// cannot be read, or is neither empty nor a report ("benchmark" or "doctor" with a text as value). To be
/// said before the work that is reported. An empty path is no file, and no fault.
void require_report_place(const std::filesystem::path& file);

/// Puts `report` at such a place (where that is a link, at the end of it; an empty path is no file) and
/// prints `table`, which people read. One that cannot be written does not take the other along. Throws
/// UserError.
void publish_report(const std::filesystem::path& file, std::string_view report, std::string_view table);

}  // namespace longhalo

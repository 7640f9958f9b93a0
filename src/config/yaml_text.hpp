// Reads YAML text from a file or a string, refusing what would make later messages or results doubtful: text
// that is not UTF-8, NUL bytes, several YAML documents, and files too large to be a config.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "config/faults.hpp"

namespace longhalo {

/// Empty, with a fault added, when the file cannot be read or is larger than 1 MiB. A pipe is waited for
/// until `asked_to_stop` says yes; StopRequest is thrown then.
std::optional<std::string> read_config_file(const std::filesystem::path& path, ConfigFaults& faults,
                                            const std::function<bool()>& asked_to_stop);

/// The root node (null for empty text). Empty, with a fault added, when `yaml` is not one YAML document.
std::optional<YAML::Node> parse_yaml(std::string_view yaml, const ValueSource& source, ConfigFaults& faults);

}  // namespace longhalo

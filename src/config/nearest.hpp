// Finds the config key that a misspelt one was probably meant to be.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace longhalo {

/// The likely meaning of a dotted key path: a key of the same section is preferred, then the same name
/// elsewhere.
std::optional<std::string> nearest_key(std::string_view path, const std::vector<std::string>& known);

}  // namespace longhalo

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

/// The key that a variable's name means where an underscore is missing, or doubled in vain: dots of keys and
/// underscores count alike, and of six letters one may be wrong, of twelve and more two, since names without
/// a section may be anybody's. Of shorter names only the singular is near: TASK, but not MASKS.
std::optional<std::string> nearest_spelling(std::string_view name, const std::vector<std::string>& known);

}  // namespace longhalo

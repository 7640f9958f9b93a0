// Text as Python sees it: code points rather than bytes, Unicode white space, repr() and JSON forms. Input is
// UTF-8; a byte that is not part of a well-formed character counts as one character of its own.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace longhalo::jinja {

/// The characters of `text`, each as its bytes.
std::vector<std::string_view> characters(std::string_view text);

/// str.isspace() of one character.
bool is_space(std::string_view character);

enum class Side { kLeft, kRight, kBoth };

/// str.strip(), lstrip() and rstrip() of white space, or of the characters in `set`.
std::string_view strip_space(std::string_view text, Side side);
std::string_view strip_set(std::string_view text, std::string_view set, Side side);

std::string utf8_of(uint32_t code_point);

/// repr() of a float: the shortest digits that read back the same, "1.0", "1e-05", "inf".
std::string float_repr(double value);
/// repr() of a str; characters beyond ASCII are taken as printable.
std::string string_repr(std::string_view text);
/// The JSON string, in quotes. `ascii_only` writes \uXXXX for what is beyond ASCII.
std::string json_string(std::string_view text, bool ascii_only);

}  // namespace longhalo::jinja

// UTF-8 as bytes: strict decoding (no overlong forms, no surrogates, nothing above U+10FFFF), because the
// pattern matcher is told not to check again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace longhalo {

struct CodePoint {
  uint32_t value = 0;
  int length_bytes = 0;  ///< 0: no valid character starts here
};

/// The character that starts at text[at]; `at` < text.size().
CodePoint code_point_at(std::string_view text, size_t at);

/// The character that ends just before text[end] in valid UTF-8; `end` > 0.
CodePoint code_point_before(std::string_view text, size_t end);

/// Length in bytes of the longest valid prefix of `text`.
size_t valid_utf8_prefix(std::string_view text);

void append_utf8(std::string& text, uint32_t code_point);

/// Unicode property White_Space (the same 25 code points since Unicode 6.3).
bool is_white_space(uint32_t code_point);

}  // namespace longhalo

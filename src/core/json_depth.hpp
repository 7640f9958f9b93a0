// How deep the arrays and objects of a JSON text lie in one another. JSON libraries write and compare values
// by recursion, so a file of a hundred thousand brackets would end the process: readers of files that others
// wrote look first. No file of a model or of LongHalo itself is nested deeper than ten.
#pragma once

#include <cstdint>
#include <string_view>

namespace longhalo {

inline constexpr int64_t kMostJsonDepth = 64;

/// 0 for a number, 1 for [], 2 for [[]]; of a text that is no JSON, some number that is never too small for
/// what a parser makes of its beginning.
int64_t json_depth(std::string_view json);

}  // namespace longhalo

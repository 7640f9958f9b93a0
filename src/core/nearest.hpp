// "Did you mean": finds the known name that a misspelt one was probably meant to be.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace longhalo {

/// Least number of insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`
/// (optimal string alignment distance). O(|a| * |b|); inputs longer than 256 bytes are cut to that.
int64_t edit_distance(std::string_view a, std::string_view b);

/// So many edits still leave a likely meaning.
int64_t likely_edits(std::string_view word);

/// The nearest of `known`, if it is near enough to be a likely meaning.
std::optional<std::string> nearest_word(std::string_view word, const std::vector<std::string>& known);

/// The nearest of `known`, however far; empty if there are none.
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);

}  // namespace longhalo

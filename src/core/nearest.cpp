#include "core/nearest.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace longhalo {

int64_t likely_edits(std::string_view word) {
  return std::max<int64_t>(1, static_cast<int64_t>(word.size()) / 3);
}

int64_t edit_distance(std::string_view a, std::string_view b) {
  constexpr size_t kLongest = 256;
  a = a.substr(0, kLongest);
  b = b.substr(0, kLongest);
  const size_t width = b.size() + 1;
  std::vector<int64_t> before(width), above(width), row(width);
  for (size_t j = 0; j < width; ++j)
    above[j] = static_cast<int64_t>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int64_t>(i);
    for (size_t j = 1; j < width; ++j) {
      const int64_t substitute = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, substitute});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    std::swap(before, above);
    std::swap(above, row);
  }
  return above[b.size()];
}

std::optional<std::string> nearest_word(std::string_view word, const std::vector<std::string>& known) {
  std::optional<std::string> best;
  int64_t least = likely_edits(word) + 1;
  for (const std::string& candidate : known) {
    const int64_t distance = edit_distance(word, candidate);
    if (distance < least) {
      least = distance;
      best = candidate;
    }
  }
  return best;
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& known) {
  std::string best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const std::string& candidate : known) {
    const int64_t distance = edit_distance(name, candidate);
    if (distance < least) {
      least = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace longhalo

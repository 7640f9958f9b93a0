#include "config/nearest.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace longhalo {
namespace {

std::pair<std::string_view, std::string_view> split_leaf(std::string_view path) {
  const size_t dot = path.rfind('.');
  if (dot == std::string_view::npos) return {"", path};
  return {path.substr(0, dot), path.substr(dot + 1)};
}

int64_t likely(std::string_view word) {
  return std::max<int64_t>(1, static_cast<int64_t>(word.size()) / 3);
}

}  // namespace

int64_t edit_distance(std::string_view a, std::string_view b) {
  constexpr size_t kLongest = 64;
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
  int64_t least = likely(word) + 1;
  for (const std::string& candidate : known) {
    const int64_t distance = edit_distance(word, candidate);
    if (distance < least) {
      least = distance;
      best = candidate;
    }
  }
  return best;
}

std::optional<std::string> nearest_key(std::string_view path, const std::vector<std::string>& known) {
  const auto [section, leaf] = split_leaf(path);
  std::optional<std::string> best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const std::string& candidate : known) {
    const auto [known_section, known_leaf] = split_leaf(candidate);
    const int64_t leaf_distance = edit_distance(leaf, known_leaf);
    const int64_t section_distance = edit_distance(section, known_section);
    if (leaf_distance > likely(leaf)) continue;
    // A key in the wrong section costs at most two, however different the sections' names are.
    const int64_t cost = 2 * leaf_distance + std::min<int64_t>(2, section_distance);
    if (cost < least) {
      least = cost;
      best = candidate;
    }
  }
  return best;
}

}  // namespace longhalo

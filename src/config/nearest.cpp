#include "config/nearest.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/nearest.hpp"

namespace longhalo {
namespace {

std::pair<std::string_view, std::string_view> split_leaf(std::string_view path) {
  const size_t dot = path.rfind('.');
  if (dot == std::string_view::npos) return {"", path};
  return {path.substr(0, dot), path.substr(dot + 1)};
}

std::string with_underscores(std::string_view path) {
  std::string flat(path);
  std::replace(flat.begin(), flat.end(), '.', '_');
  return flat;
}

}  // namespace

std::optional<std::string> nearest_key(std::string_view path, const std::vector<std::string>& known) {
  const auto [section, leaf] = split_leaf(path);
  std::optional<std::string> best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const std::string& candidate : known) {
    const auto [known_section, known_leaf] = split_leaf(candidate);
    const int64_t leaf_distance = edit_distance(leaf, known_leaf);
    const int64_t section_distance = edit_distance(section, known_section);
    if (leaf_distance > likely_edits(leaf)) continue;
    // A key in the wrong section costs at most two, however different the sections' names are.
    const int64_t cost = 2 * leaf_distance + std::min<int64_t>(2, section_distance);
    if (cost < least) {
      least = cost;
      best = candidate;
    }
  }
  return best;
}

std::optional<std::string> nearest_spelling(std::string_view name, const std::vector<std::string>& known) {
  constexpr int64_t kMostWrong = 2, kLettersForOneWrong = 6;
  const std::string flat = with_underscores(name);
  std::optional<std::string> best;
  int64_t least = std::min(kMostWrong, static_cast<int64_t>(flat.size()) / kLettersForOneWrong) + 1;
  for (const std::string& candidate : known) {
    if (candidate == flat + 's') return candidate;
    const int64_t wrong = edit_distance(flat, with_underscores(candidate));
    if (wrong >= least) continue;
    least = wrong;
    best = candidate;
  }
  return best;
}

}  // namespace longhalo

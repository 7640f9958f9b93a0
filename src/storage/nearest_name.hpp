// "Did you mean": the known name with the fewest single-character edits from the one asked for.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

namespace longhalo {

/// Empty if there are no names. Cost: length^2 for each name.
inline std::string nearest_name(std::string_view wanted, const std::vector<std::string>& names) {
  std::string best;
  size_t best_edits = static_cast<size_t>(-1);
  std::vector<size_t> row(wanted.size() + 1);
  for (const std::string& name : names) {
    std::iota(row.begin(), row.end(), size_t{0});
    for (size_t i = 0; i < name.size(); ++i) {
      size_t diagonal = row[0]++;
      for (size_t j = 0; j < wanted.size(); ++j) {
        const size_t replaced = diagonal + (name[i] != wanted[j]);
        diagonal = row[j + 1];
        row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
      }
    }
    if (row.back() < best_edits) {
      best_edits = row.back();
      best = name;
    }
  }
  return best;
}

}  // namespace longhalo

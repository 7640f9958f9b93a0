#include "model/attention_pattern.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {

AttentionPattern AttentionPattern::window_and_landmarks(int64_t window, int64_t landmark_stride) {
  check(window >= 1 && landmark_stride >= 0 && landmark_stride <= window, "0 <= landmark stride <= window");
  AttentionPattern pattern{{{1, 0, window}}};
  if (landmark_stride > 0) pattern.bands.push_back({landmark_stride, window, kUnlimited});
  return pattern;
}

std::vector<int64_t> AttentionPattern::strides() const {
  std::vector<int64_t> strides;
  for (const Band& band : bands)
    if (band.stride > 1) strides.push_back(band.stride);
  return strides;
}

int64_t AttentionPattern::exact_reach() const {
  int64_t reach = 0;
  for (const Band& band : bands)
    if (band.stride == 1) reach = std::max(reach, band.far);
  return reach;
}

std::string AttentionPattern::describe() const {
  std::string words;
  for (const Band& band : bands)
    words += text(words.empty() ? "" : " ", "{", band.stride, ", ", band.near, ", ",
                  band.far == kUnlimited ? "inf" : text(band.far), "}");
  return words;
}

int64_t sequence_visible_pairs(const AttentionPattern& pattern, int64_t n) {
  const auto sum_of_quotients = [](int64_t count, int64_t s) {  // floor(k / s) of k = 0 ... count - 1
    const int64_t whole = count / s, rest = count % s;
    return s * (whole * (whole - 1) / 2) + whole * rest;
  };
  int64_t pairs = 0;
  for (const Band& band : pattern.bands) {
    const int64_t reach = std::max(band.near, band.stride - 1);
    if (band.far <= reach) {  // some tokens see nothing, though others before them do: one by one
      for (int64_t i = 0; i < n; ++i)
        pairs += visible_keys(band, i).count();
      continue;
    }
    // Token i sees the keys that begin early enough, floor((i - reach) / s) + 1 of them, but for those that
    // lie too far back, floor((i - far + 1) / s).
    if (n > reach) pairs += sum_of_quotients(n - reach, band.stride) + (n - reach);
    if (n > band.far - 1) pairs -= sum_of_quotients(n - (band.far - 1), band.stride);
  }
  return pairs;
}

}  // namespace longhalo

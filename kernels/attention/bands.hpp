// Which keys a query sees: bands of several scales in one softmax.
//
// A band holds the keys of one scale. Key g of a band with stride s summarises tokens [g*s, (g+1)*s); with
// stride 1 it is the exact token. Query i sees key g iff
//     g*s <= i - near   and   (g+1)*s - 1 > i - far   and   (g+1)*s - 1 <= i   and   g*s >= doc_start(i).
// Local window W: {1, 0, W}. Landmarks of stride S <= W beyond it: {S, W, kUnlimited}.
// Dense causal attention: {1, 0, kUnlimited}.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace longhalo {

inline constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
inline constexpr int kMaxBands = 4;

struct Band {
  int64_t stride = 1;
  int64_t near = 0;
  int64_t far = kUnlimited;
  bool operator==(const Band&) const = default;
};

/// Half-open range of global key indices.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t count() const { return end > begin ? end - begin : 0; }
};

/// The keys of `band` that query `i` sees, of all that ever exist. Both ends grow with i (same doc_start).
inline KeyRange visible_keys(const Band& band, int64_t i, int64_t doc_start = 0) {
  const int64_t s = band.stride;
  const int64_t last_first_token = std::min(i - band.near, i - (s - 1));  // g*s may be at most this
  if (last_first_token < 0) return {0, 0};
  const int64_t end = last_first_token / s + 1;
  // (g+1)*s - 1 > i - far  <=>  g*s > i - far - s + 1
  const int64_t oldest = band.far > i ? 0 : i - band.far + 1;  // oldest token position that counts
  int64_t begin = oldest / s;                                  // the segment that holds it
  begin = std::max(begin, (doc_start + s - 1) / s);
  return {std::min(begin, end), end};
}

}  // namespace longhalo

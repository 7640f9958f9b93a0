#include "kernels/attention/attention.hpp"
#include "kernels/attention/attention_checks.hpp"

namespace longhalo {

template <class T>
int64_t visible_pairs(const Attention<T>& p) {
  check(!p.bands.empty() && p.bands.size() <= static_cast<size_t>(kMaxBands), "attention takes 1 to 4 bands");
  int64_t pairs = 0;
  for (const BandKeys<T>& keys : p.bands) {
    for (int64_t row = 0; row < p.queries; ++row) {
      const KeyRange seen =
          visible_keys(keys.band, p.first_query + row, p.doc_start != nullptr ? p.doc_start[row] : 0);
      pairs += KeyRange{std::max(seen.begin, keys.first_key), std::min(seen.end, keys.first_key + keys.count)}
                   .count();
    }
  }
  return pairs;
}

template int64_t visible_pairs(const Attention<BFloat16>&);  // doc_start on the host
template int64_t visible_pairs(const Attention<float>&);
template int64_t visible_pairs(const Attention<double>&);

}  // namespace longhalo

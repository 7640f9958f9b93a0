#include "telemetry/stragglers.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace longhalo {
namespace {

// Of an even number the lower one, so that the slower one of two ranks can be told. 0 where there is none.
double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

std::vector<StragglerChange> StragglerWatch::take(std::span<const double> seconds,
                                                  std::span<const double> work) {
  ranks_.resize(std::max(ranks_.size(), seconds.size()));
  check(ranks_.size() == seconds.size() && work.size() == seconds.size(), "every record has all ranks");
  std::vector<StragglerChange> changes;
  std::vector<double> whole, for_work;
  for (size_t rank = 0; rank < seconds.size(); ++rank) {
    if (work[rank] <= 0 || seconds[rank] <= 0) continue;
    whole.push_back(seconds[rank]);
    for_work.push_back(seconds[rank] / work[rank]);
  }
  if (ratio_ <= 0 || whole.size() < 2) return changes;
  const double usual = median(whole), usual_for_work = median(for_work);
  for (size_t rank = 0; rank < seconds.size(); ++rank) {
    const double ratio =
        work[rank] > 0 ? std::min(seconds[rank] / usual, seconds[rank] / work[rank] / usual_for_work) : 0;
    Rank& known = ranks_[rank];
    known.in_a_row = (ratio > ratio_) == known.is_slow ? 0 : known.in_a_row + 1;
    if (known.in_a_row < kRecords) continue;
    known = {!known.is_slow, 0};
    changes.push_back({static_cast<int>(rank), known.is_slow, ratio});
  }
  return changes;
}

std::vector<int> StragglerWatch::slow() const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < ranks_.size(); ++rank)
    if (ranks_[rank].is_slow) ranks.push_back(static_cast<int>(rank));
  return ranks;
}

}  // namespace longhalo

// Which ranks are slow, told by how long each of them computes: a throttled GPU, or a host that something
// else uses, holds up all ranks, since they wait for each other in every layer. A rank is a straggler when it
// takes `ratio` times as long as the median rank, altogether and for its share of the work (shards may
// differ), in several records in a row; it is none any more when it did not in as many. One slow record is
// noise.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace longhalo {

/// A rank that became a straggler, or is one no more.
struct StragglerChange {
  int rank = 0;
  bool is_slow = true;
  double ratio = 0;  // to the median rank, in the newest record
};

class StragglerWatch {
 public:
  static constexpr int kRecords = 3;

  /// `ratio` 0: nobody is a straggler.
  explicit StragglerWatch(double ratio) : ratio_(ratio) {}

  /// Takes in a record: seconds of each rank's own compute, and the work it had, in any unit, 0 for none. The
  /// same number of ranks each time. With fewer than two that have work there is no one to compare.
  std::vector<StragglerChange> take(std::span<const double> seconds, std::span<const double> work);

  /// Ranks that are stragglers now, ascending.
  std::vector<int> slow() const;

 private:
  struct Rank {
    bool is_slow = false;
    int in_a_row = 0;  // records that say otherwise
  };
  double ratio_;
  std::vector<Rank> ranks_;
};

}  // namespace longhalo

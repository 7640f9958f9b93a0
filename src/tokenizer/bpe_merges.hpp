// The merges of a byte-pair encoding and the algorithm that applies them to one piece.
//
// Of all neighbouring pairs that have a merge, the one of lowest rank is merged, the leftmost first, until
// none is left (Sennrich et al. 2016). Short pieces scan their pairs; long ones keep a heap, so that a run of
// a million equal letters costs n log n.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace longhalo {

struct Merge {
  int32_t rank;    ///< lower merges first
  int32_t result;  ///< token id
};

/// (left id, right id) -> Merge, as one open-addressed array: this lookup is what encoding spends its time
/// on.
class MergeTable {
 public:
  explicit MergeTable(int64_t expected_merges = 0);

  /// A later merge of the same pair replaces the earlier one.
  void insert(int32_t left, int32_t right, Merge merge);

  /// Null if the pair does not merge. Ids are not negative.
  const Merge* find(int32_t left, int32_t right) const;

 private:
  struct Slot {
    uint64_t key = kFree;
    Merge merge{0, 0};
  };
  static constexpr uint64_t kFree = UINT64_MAX;

  size_t slot_of(uint64_t key) const;

  std::vector<Slot> slots_;
  uint64_t mask_ = 0;
};

/// Buffers of apply_merges, kept from piece to piece.
struct MergeScratch {
  struct Symbol {
    int32_t id;
    int32_t previous;
    int32_t next;  // kNone at the end
  };
  struct Candidate {
    int32_t rank;
    int32_t left;
    int32_t left_id;  // the pair as it was when queued: a stale candidate is dropped
    int32_t right_id;
  };
  std::vector<int32_t> ranks;
  std::vector<Symbol> symbols;
  std::vector<Candidate> heap;
};

/// Merges `ids` in place until no pair has a merge. At most 2^31 - 1 symbols.
void apply_merges(const MergeTable& merges, std::vector<int32_t>& ids, MergeScratch& scratch);

namespace detail {  // both ways, for the test that they agree
void merge_by_scan(const MergeTable& merges, std::vector<int32_t>& ids, MergeScratch& scratch);
void merge_by_heap(const MergeTable& merges, std::vector<int32_t>& ids, MergeScratch& scratch);
}  // namespace detail

}  // namespace longhalo

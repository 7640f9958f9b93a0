#include "tokenizer/bpe_merges.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>

#include "core/error.hpp"

namespace longhalo {
namespace {

constexpr int32_t kNone = -1;
constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();
constexpr size_t kLongestScan =
    48;  // symbols; above, the heap is faster (measured: they break even at 40 to 60)

uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

/// Order of the heap: lowest rank on top, then leftmost.
struct Later {
  bool operator()(const MergeScratch::Candidate& a, const MergeScratch::Candidate& b) const {
    return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
  }
};

}  // namespace

MergeTable::MergeTable(int64_t expected_merges) {
  const uint64_t slots = std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(expected_merges, 8)) * 2);
  slots_.resize(slots);
  mask_ = slots - 1;
}

size_t MergeTable::slot_of(uint64_t key) const {
  uint64_t slot = (key * 0x9E3779B97F4A7C15ULL) >> 20 & mask_;
  while (slots_[slot].key != key && slots_[slot].key != kFree)
    slot = (slot + 1) & mask_;
  return slot;
}

void MergeTable::insert(int32_t left, int32_t right, Merge merge) {
  const uint64_t key = pair_key(left, right);
  slots_[slot_of(key)] = {key, merge};
}

const Merge* MergeTable::find(int32_t left, int32_t right) const {
  const Slot& slot = slots_[slot_of(pair_key(left, right))];
  return slot.key == kFree ? nullptr : &slot.merge;
}

void detail::merge_by_scan(const MergeTable& merges, std::vector<int32_t>& ids, MergeScratch& scratch) {
  std::vector<int32_t>& ranks = scratch.ranks;  // ranks[i]: rank of the pair (i, i + 1)
  size_t count = ids.size();
  if (count < 2) return;
  const auto rank_of = [&](size_t i) {
    const Merge* merge = i + 1 < count ? merges.find(ids[i], ids[i + 1]) : nullptr;
    return merge != nullptr ? merge->rank : kNoRank;
  };
  ranks.resize(count);
  for (size_t i = 0; i < count; ++i)
    ranks[i] = rank_of(i);
  while (true) {
    const auto best = std::min_element(ranks.begin(), ranks.begin() + static_cast<ptrdiff_t>(count));
    if (*best == kNoRank) break;
    const auto i = static_cast<size_t>(best - ranks.begin());
    ids[i] = merges.find(ids[i], ids[i + 1])->result;
    std::copy(ids.begin() + static_cast<ptrdiff_t>(i) + 2, ids.begin() + static_cast<ptrdiff_t>(count),
              ids.begin() + static_cast<ptrdiff_t>(i) + 1);
    std::copy(best + 2, ranks.begin() + static_cast<ptrdiff_t>(count), best + 1);
    --count;
    ranks[i] = rank_of(i);
    if (i > 0) ranks[i - 1] = rank_of(i - 1);
  }
  ids.resize(count);
}

void detail::merge_by_heap(const MergeTable& merges, std::vector<int32_t>& ids, MergeScratch& scratch) {
  check(ids.size() < static_cast<size_t>(std::numeric_limits<int32_t>::max()),
        "a piece has fewer than 2^31 symbols");
  const auto count = static_cast<int32_t>(ids.size());
  auto& symbols = scratch.symbols;
  auto& heap = scratch.heap;
  symbols.clear();
  heap.clear();
  for (int32_t i = 0; i < count; ++i) {
    symbols.push_back({ids[static_cast<size_t>(i)], i - 1, i + 1 < count ? i + 1 : kNone});
  }
  const auto symbol = [&](int32_t i) -> MergeScratch::Symbol& { return symbols[static_cast<size_t>(i)]; };
  const auto queue = [&](int32_t left) {
    const int32_t right = left == kNone ? kNone : symbol(left).next;
    if (right == kNone) return false;
    const Merge* merge = merges.find(symbol(left).id, symbol(right).id);
    if (merge == nullptr) return false;
    heap.push_back({merge->rank, left, symbol(left).id, symbol(right).id});
    return true;
  };
  const auto queue_and_sift = [&](int32_t left) {
    if (queue(left)) std::push_heap(heap.begin(), heap.end(), Later{});
  };

  for (int32_t i = 0; i < count; ++i)
    queue(i);
  std::make_heap(heap.begin(), heap.end(), Later{});
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), Later{});
    const MergeScratch::Candidate top = heap.back();
    heap.pop_back();
    // A symbol that was merged away has id kNone, and symbols only grow, so equal ids mean that the pair
    // still stands.
    if (symbol(top.left).id != top.left_id) continue;
    const int32_t right = symbol(top.left).next;
    if (right == kNone || symbol(right).id != top.right_id) continue;
    symbol(top.left).id = merges.find(top.left_id, top.right_id)->result;
    symbol(top.left).next = symbol(right).next;
    if (symbol(right).next != kNone) symbol(symbol(right).next).previous = top.left;
    symbol(right).id = kNone;
    queue_and_sift(symbol(top.left).previous);
    queue_and_sift(top.left);
  }

  ids.clear();
  for (int32_t i = count > 0 ? 0 : kNone; i != kNone; i = symbol(i).next)
    ids.push_back(symbol(i).id);
}

void apply_merges(const MergeTable& merges, std::vector<int32_t>& ids, MergeScratch& scratch) {
  if (ids.size() <= kLongestScan) {
    detail::merge_by_scan(merges, ids, scratch);
  } else {
    detail::merge_by_heap(merges, ids, scratch);
  }
}

}  // namespace longhalo

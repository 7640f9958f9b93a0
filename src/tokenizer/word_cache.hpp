// Words already encoded: bytes of a piece -> its ids. Bounded: when full it starts afresh, so memory stays
// the same for a document of any length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace longhalo {

class WordCache {
 public:
  /// Longer pieces repeat too seldom to be worth keeping.
  static constexpr size_t kLongestWord_bytes = 64;

  WordCache();

  /// Nothing if `word` is not held. The ids stay valid until the next insert().
  std::optional<std::span<const int32_t>> find(std::string_view word);

  /// `word` has 1 to kLongestWord_bytes bytes and is not held.
  void insert(std::string_view word, std::span<const int32_t> ids);

 private:
  static constexpr size_t kSlots = size_t{1} << 16;
  static constexpr size_t kMostWords = kSlots / 2;

  struct Slot {
    uint64_t hash = 0;
    uint32_t word_begin = 0;   // into words_
    uint32_t ids_begin = 0;    // into ids_
    uint16_t word_length = 0;  // 0: free
    uint16_t id_count = 0;
  };

  Slot& slot_of(std::string_view word, uint64_t hash);

  std::vector<Slot> slots_;
  std::string words_;
  std::vector<int32_t> ids_;
  size_t held_ = 0;
};

}  // namespace longhalo

#include "tokenizer/word_cache.hpp"

#include <algorithm>
#include <functional>

namespace longhalo {

WordCache::WordCache() : slots_(kSlots) {}

WordCache::Slot& WordCache::slot_of(std::string_view word, uint64_t hash) {
  size_t at = hash & (kSlots - 1);
  while (true) {
    Slot& slot = slots_[at];
    if (slot.word_length == 0) return slot;
    const std::string_view held(words_.data() + slot.word_begin, slot.word_length);
    if (slot.hash == hash && held == word) return slot;
    at = (at + 1) & (kSlots - 1);
  }
}

std::optional<std::span<const int32_t>> WordCache::find(std::string_view word) {
  const Slot& slot = slot_of(word, std::hash<std::string_view>{}(word));
  if (slot.word_length == 0) return std::nullopt;
  return std::span<const int32_t>(ids_.data() + slot.ids_begin, slot.id_count);
}

void WordCache::insert(std::string_view word, std::span<const int32_t> ids) {
  if (held_ == kMostWords) {
    std::fill(slots_.begin(), slots_.end(), Slot{});
    words_.clear();
    ids_.clear();
    held_ = 0;
  }
  const uint64_t hash = std::hash<std::string_view>{}(word);
  Slot& slot = slot_of(word, hash);
  slot.hash = hash;
  slot.word_begin = static_cast<uint32_t>(words_.size());
  slot.ids_begin = static_cast<uint32_t>(ids_.size());
  slot.word_length = static_cast<uint16_t>(word.size());
  slot.id_count = static_cast<uint16_t>(ids.size());
  words_ += word;
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  ++held_;
}

}  // namespace longhalo

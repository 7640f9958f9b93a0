// The "model" of a byte-level BPE tokenizer.json: the vocabulary, the merges, and the ids of one piece.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/bpe_merges.hpp"
#include "tokenizer/json_cursor.hpp"
#include "tokenizer/string_map.hpp"

namespace longhalo {

/// Ids at or above this are refused: they would make tables of absurd size.
inline constexpr int64_t kLargestVocabulary = int64_t{1} << 24;

class BpeModel {
 public:
  /// Reads the value of "model". Throws UserError for another kind of model, options that are not supported,
  /// merges that are missing or name unknown tokens, and ids that are absurd or used twice.
  explicit BpeModel(const JsonCursor& description);

  /// Sets `ids` to those of one piece of the pre-tokenizer. Throws UserError if a byte has no token and the
  /// file names no unknown token.
  void encode_piece(std::string_view piece, std::vector<int32_t>& ids, MergeScratch& scratch) const;

  /// The token of a lone byte; nothing if it has none and the file names no unknown token.
  std::optional<int32_t> byte_token(unsigned char byte) const;

  /// How many bytes of `text` have neither a token nor an unknown token to stand for them.
  int64_t count_left_out(std::string_view text) const;

  std::optional<int32_t> token_id(std::string_view spelling) const;
  /// Largest id + 1.
  int64_t size() const { return static_cast<int64_t>(bytes_of_.size()); }
  /// What the token stands for; nothing if no token has this id.
  const std::optional<std::string>& bytes_of(int32_t id) const { return bytes_of_[static_cast<size_t>(id)]; }

 private:
  static constexpr int32_t kNone = -1;

  void read_options(const JsonCursor& description);
  void read_vocabulary(const JsonCursor& vocabulary);
  void read_merges(const JsonCursor& merges);
  void find_byte_tokens(const JsonCursor& description);

  StringMap<int32_t> id_of_;                          // by spelling in the byte alphabet
  StringMap<int32_t> whole_piece_;                    // by bytes; filled only with ignore_merges
  std::vector<std::optional<std::string>> bytes_of_;  // by id
  std::array<int32_t, 256> byte_token_{};             // kNone: the byte is left out
  MergeTable merges_;
  std::array<bool, 256> is_unknown_{};  // its token is the unknown token
  bool fuse_unknown_ = false;
  bool ignore_merges_ = false;
};

}  // namespace longhalo

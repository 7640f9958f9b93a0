// Tokens that are recognised in the text itself, before any pre-tokenizer or model sees it: special tokens
// such as
// "<|im_end|>" and other added ones.
//
// Of the tokens that start at a place the longest wins; matching goes on after it. A match may be turned down
// (single_word, or a special token in a document) and its text then belongs to the text around it; lstrip and
// rstrip make it swallow the white space beside it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokenizer/tokenizer.hpp"

namespace longhalo {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
  bool single_word = false;  ///< only where no letter, mark, digit or connector touches it
  bool left_strip = false;
  bool right_strip = false;
  bool normalized = false;  ///< looked for in the normalised text
};

/// A prefix tree over the contents of some added tokens.
class AddedTokens {
 public:
  struct Part {
    size_t begin = 0;
    size_t end = 0;
    const AddedToken* token = nullptr;  ///< null: plain text
  };

  /// `is_word_character` is asked for single_word tokens only. Contents must not be empty.
  AddedTokens(std::vector<AddedToken> tokens, std::function<bool(uint32_t)> is_word_character);

  AddedTokens(AddedTokens&&) = default;  // the tree points into tokens_, which a move keeps in place
  AddedTokens(const AddedTokens&) = delete;

  /// Cuts valid UTF-8 into plain text (never empty) and tokens, in order.
  std::vector<Part> split(std::string_view text, SpecialTokens mode) const;

  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  struct Node {
    const AddedToken* token = nullptr;
    std::vector<std::pair<char, int32_t>> children;
  };

  const AddedToken* longest_at(std::string_view text, size_t at) const;
  bool is_alone(std::string_view text, size_t begin, size_t end) const;

  std::vector<AddedToken> tokens_;
  std::function<bool(uint32_t)> is_word_character_;
  std::vector<Node> nodes_;
  std::array<bool, 256> starts_{};  // bytes that some token starts with
};

}  // namespace longhalo

#include "tokenizer/added_tokens.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "tokenizer/utf8.hpp"

namespace longhalo {
namespace {

/// Start of the white space that ends at `end`, but not before `floor`.
size_t white_space_before(std::string_view text, size_t end, size_t floor) {
  while (end > floor) {
    const CodePoint c = code_point_before(text, end);
    if (!is_white_space(c.value)) break;
    end -= static_cast<size_t>(c.length_bytes);
  }
  return std::max(end, floor);
}

size_t white_space_after(std::string_view text, size_t at) {
  while (at < text.size()) {
    const CodePoint c = code_point_at(text, at);
    if (!is_white_space(c.value)) break;
    at += static_cast<size_t>(c.length_bytes);
  }
  return at;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens, std::function<bool(uint32_t)> is_word_character)
    : tokens_(std::move(tokens)), is_word_character_(std::move(is_word_character)), nodes_(1) {
  for (const AddedToken& token : tokens_) {
    check(!token.content.empty(), "an added token has a content");
    starts_[static_cast<unsigned char>(token.content.front())] = true;
    size_t node = 0;
    for (const char byte : token.content) {
      const auto& children = nodes_[node].children;
      const auto child =
          std::find_if(children.begin(), children.end(), [&](auto& c) { return c.first == byte; });
      if (child != children.end()) {
        node = static_cast<size_t>(child->second);
        continue;
      }
      nodes_[node].children.emplace_back(byte, static_cast<int32_t>(nodes_.size()));
      node = nodes_.size();
      nodes_.emplace_back();
    }
    nodes_[node].token = &token;
  }
}

const AddedToken* AddedTokens::longest_at(std::string_view text, size_t at) const {
  const AddedToken* longest = nullptr;
  size_t node = 0;
  for (; at < text.size(); ++at) {
    const auto& children = nodes_[node].children;
    const auto child =
        std::find_if(children.begin(), children.end(), [&](auto& c) { return c.first == text[at]; });
    if (child == children.end()) break;
    node = static_cast<size_t>(child->second);
    if (nodes_[node].token != nullptr) longest = nodes_[node].token;
  }
  return longest;
}

bool AddedTokens::is_alone(std::string_view text, size_t begin, size_t end) const {
  const bool joined_left = begin > 0 && is_word_character_(code_point_before(text, begin).value);
  const bool joined_right = end < text.size() && is_word_character_(code_point_at(text, end).value);
  return !joined_left && !joined_right;
}

std::vector<AddedTokens::Part> AddedTokens::split(std::string_view text, SpecialTokens mode) const {
  std::vector<Part> parts;
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const AddedToken* token = starts_[static_cast<unsigned char>(text[at])] ? longest_at(text, at) : nullptr;
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at;
    size_t end = at + token->content.size();
    at = end;
    if (token->special && mode == SpecialTokens::kAsText) continue;
    if (token->single_word && !is_alone(text, begin, end)) continue;
    if (token->left_strip) begin = white_space_before(text, begin, std::min(done, begin));
    if (token->right_strip) end = white_space_after(text, end);
    if (begin > done) parts.push_back({done, begin, nullptr});
    parts.push_back({begin, end, token});
    done = end;
  }
  if (done < text.size()) parts.push_back({done, text.size(), nullptr});
  return parts;
}

}  // namespace longhalo

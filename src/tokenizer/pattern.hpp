// A regular expression of a tokenizer.json, run by PCRE2 with just-in-time compilation.
//
// tokenizer.json expressions are written for Oniguruma, whose syntax differs from PCRE2's in corners. Only
// constructs with the same meaning in both (or a known translation: \s) are accepted; the rest is refused by
// name. Character categories are those of the installed PCRE2's Unicode version.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

// PCRE2's own type names, so that its header stays out of ours.
struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace longhalo {

struct ByteRange {
  size_t begin = 0;
  size_t end = 0;
};

/// Memory for one thread's matching, used by any number of patterns one after the other.
class MatchScratch {
 public:
  MatchScratch();
  ~MatchScratch();
  MatchScratch(const MatchScratch&) = delete;
  MatchScratch& operator=(const MatchScratch&) = delete;

 private:
  friend class Pattern;
  pcre2_real_match_context_8* context_ = nullptr;
  pcre2_real_jit_stack_8* jit_stack_ = nullptr;
  pcre2_real_match_data_8* match_data_ = nullptr;
};

class Pattern {
 public:
  /// A tokenizer.json expression. `where` names it in errors. Throws UserError if it is not supported or can
  /// match the empty string.
  static Pattern regex(std::string_view expression, std::string_view where);
  /// Matches exactly `text`, which must not be empty.
  static Pattern literal(std::string_view text, std::string_view where);

  /// One character of a word: a letter, mark, decimal digit, connector or joiner (Unicode Technical Standard
  /// 18).
  static Pattern word_character();

  /// Finds the first match at or after byte `from` of valid UTF-8. Whole characters; never empty. Thread-safe
  /// with one scratch a thread.
  bool find(std::string_view subject, size_t from, MatchScratch& scratch, ByteRange& match) const;

 private:
  Pattern(const std::string& pcre2_expression, unsigned options, std::string_view where);

  std::shared_ptr<pcre2_real_code_8> code_;
};

/// The PCRE2 spelling of a tokenizer.json expression. Throws UserError for a construct that is not supported.
std::string translate_expression(std::string_view expression, std::string_view where);

}  // namespace longhalo

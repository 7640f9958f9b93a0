// From Oniguruma's syntax to PCRE2's: an allow-list walked once from left to right.
#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "core/text.hpp"
#include "tokenizer/pattern.hpp"

namespace longhalo {
namespace {

// Property White_Space spelled out: PCRE2's own \s also takes U+180E, which is no white space since
// Unicode 6.3.
constexpr std::string_view kWhiteSpace =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

constexpr std::array<std::string_view, 37> kCategories = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd", "Nl",
    "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk",
    "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Co", "Cn", "Cs"};

bool is_ascii_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}
bool is_ascii_digit(char c) {
  return c >= '0' && c <= '9';
}

class Translator {
 public:
  Translator(std::string_view expression, std::string_view where) : in_(expression), where_(where) {}

  std::string run() {
    while (at_ < in_.size())
      element();
    if (!groups_.empty()) refuse("a group that is not closed");
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    throw UserError(text("in the pattern ", in_, " (byte ", at_, "): ", what, " is not supported"), where_,
                    "use a tokenizer with a pre-tokenizer like that of GPT-2, Llama-3, Qwen2 or SmolLM2");
  }
  bool next_is(std::string_view expected) const { return in_.substr(at_, expected.size()) == expected; }
  char peek(size_t ahead) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }
  void copy(size_t count) {
    out_ += in_.substr(at_, count);
    at_ += count;
  }
  bool in_caseless() const { return !groups_.empty() && groups_.back().caseless; }

  void element() {
    switch (in_[at_]) {
      case '(':
        return open_group();
      case ')':
        return close_group();
      case '[':
        return character_class();
      case '\\':
        return escape(/*inside_class=*/false);
      case '*':
      case '+':
        mark_repeat();
        return copy(1);
      case '{':
        mark_repeat();
        return interval();
      case '.':
      case '^':
      case '$':
        refuse(text("'", in_[at_], "'"));
      default:
        return copy(1);
    }
  }

  void open_group() {
    bool caseless = in_caseless();
    std::string_view opening = "(";
    if (peek(1) == '?') {
      constexpr std::array<std::string_view, 5> kOpenings = {"(?:", "(?i:", "(?!", "(?=", "(?>"};
      const auto known = std::find_if(kOpenings.begin(), kOpenings.end(), [&](auto o) { return next_is(o); });
      if (known == kOpenings.end()) refuse("this kind of group");
      opening = *known;
      caseless = caseless || opening == "(?i:";
    }
    groups_.push_back({caseless, /*repeats=*/false});
    copy(opening.size());
  }

  void close_group() {
    if (groups_.empty()) refuse("a ')' that closes nothing");
    const bool repeats = groups_.back().repeats;
    groups_.pop_back();
    copy(1);
    if (repeats) mark_repeat();
    const bool repeated = peek(0) == '*' || peek(0) == '+' || peek(0) == '{';
    if (repeats && repeated) refuse("a repeated group with a repeat inside (its time may explode)");
  }

  void mark_repeat() {
    if (!groups_.empty()) groups_.back().repeats = true;
  }

  /// {n}, {n,} or {n,m} without a suffix, whose meaning differs.
  void interval() {
    size_t end = at_ + 1;
    while (end < in_.size() && is_ascii_digit(in_[end]))
      ++end;
    const bool has_minimum = end > at_ + 1;
    if (end < in_.size() && in_[end] == ',') ++end;
    while (end < in_.size() && is_ascii_digit(in_[end]))
      ++end;
    if (!has_minimum || end >= in_.size() || in_[end] != '}') refuse("this use of '{'");
    copy(end + 1 - at_);
    if (peek(0) == '+' || peek(0) == '?' || peek(0) == '*') refuse("a suffix after '}'");
  }

  void character_class() {
    // Case folding of a class by categories differs between the engines.
    if (in_caseless()) refuse("a character class inside (?i:...)");
    copy(peek(1) == '^' ? 2 : 1);
    if (peek(0) == ']') refuse("']' as the first member of a class");
    bool after_set = false;
    while (at_ < in_.size() && in_[at_] != ']') {
      if (in_[at_] == '[') refuse("a class inside a class");
      if (next_is("&&")) refuse("'&&'");
      if (in_[at_] == '-' && after_set && peek(1) != ']') refuse("a range that starts with a set");
      after_set = in_[at_] == '\\' && !is_single(peek(1));
      if (in_[at_] == '\\') {
        escape(/*inside_class=*/true);
      } else {
        copy(1);
      }
    }
    if (at_ >= in_.size()) refuse("a class that is not closed");
    copy(1);
  }

  /// Escapes that stand for one character.
  static bool is_single(char c) {
    return c == 'r' || c == 'n' || c == 't' ||
           (c > ' ' && c < '\x7f' && !is_ascii_letter(c) && !is_ascii_digit(c));
  }

  void escape(bool inside_class) {
    const char kind = peek(1);
    if (is_single(kind)) return copy(2);
    if (in_caseless()) refuse("a character set inside (?i:...)");
    switch (kind) {
      case 's':
        out_ += inside_class ? std::string(kWhiteSpace) : text("[", kWhiteSpace, "]");
        at_ += 2;
        return;
      case 'S':
        if (inside_class) refuse("\\S inside a class");
        out_ += text("[^", kWhiteSpace, "]");
        at_ += 2;
        return;
      case 'd':
        out_ += "\\p{Nd}";
        at_ += 2;
        return;
      case 'p':
      case 'P':
        return category();
      default:
        refuse(text("'\\", kind == '\0' ? std::string() : std::string(1, kind), "'"));
    }
  }

  void category() {
    const size_t end = in_.find('}', at_);
    if (peek(2) != '{' || end == std::string_view::npos) refuse("a category without braces");
    const std::string_view name = in_.substr(at_ + 3, end - at_ - 3);
    if (std::find(kCategories.begin(), kCategories.end(), name) == kCategories.end()) {
      refuse(text("the property ", name));
    }
    copy(end + 1 - at_);
  }

  std::string_view in_;
  std::string_view where_;
  size_t at_ = 0;
  std::string out_;
  struct Group {
    bool caseless;
    bool repeats;  // holds *, + or {...}
  };
  std::vector<Group> groups_;  // the open ones
};

}  // namespace

std::string translate_expression(std::string_view expression, std::string_view where) {
  return Translator(expression, where).run();
}

}  // namespace longhalo

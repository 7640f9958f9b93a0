#include "tokenizer/jinja_lexer.hpp"

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/text.hpp"
#include "tokenizer/jinja_text.hpp"
#include "tokenizer/jinja_value.hpp"

namespace longhalo::jinja {
namespace {

constexpr std::array<std::string_view, 27> kOperators = {"**", "//", "==", "!=", ">=", "<=", "+", "-", "/",
                                                         "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                                         ">",  "<",  "=",  ".",  ":",  "|",  ",", ";", "!"};

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool is_name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
bool is_blank(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

/// Line ends become "\n", and one at the very end goes (keep_trailing_newline is off).
std::string normalised(std::string_view source) {
  std::string out;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out += source[i];
    }
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(normalised(source)) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      const size_t tag = next_tag();
      if (tag == source_.size()) {
        emit(Token::Kind::kText, source_.substr(at_));
        move_to(tag);
        break;
      }
      read_tag(tag);
    }
    emit(Token::Kind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw TemplateError(line_, what); }

  void emit(Token::Kind kind, std::string text) {
    if (kind != Token::Kind::kText || !text.empty()) tokens_.push_back({kind, std::move(text), line_});
  }

  void move_to(size_t position) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(position), '\n'));
    at_ = position;
  }

  bool looking_at(std::string_view word) const {
    return std::string_view(source_).substr(at_).starts_with(word);
  }

  size_t next_tag() const {
    for (size_t i = at_; i + 1 < source_.size(); ++i) {
      if (source_[i] == '{' && (source_[i + 1] == '{' || source_[i + 1] == '%' || source_[i + 1] == '#'))
        return i;
    }
    return source_.size();
  }

  /// The text before a tag at `tag`, less what "-" or lstrip_blocks takes away.
  std::string text_before(size_t tag) const {
    std::string_view before = std::string_view(source_).substr(at_, tag - at_);
    const char sign = tag + 2 < source_.size() ? source_[tag + 2] : ' ';
    if (sign == '-') return std::string(strip_space(before, Side::kRight));
    if (sign == '+' || source_[tag + 1] == '{') return std::string(before);
    const size_t line_begin = before.rfind('\n') + 1;  // npos + 1 is 0
    const bool starts_line = line_begin > 0 || at_ == 0 || source_[at_ - 1] == '\n';
    if (starts_line && strip_space(before.substr(line_begin), Side::kBoth).empty())
      before = before.substr(0, line_begin);
    return std::string(before);
  }

  void read_tag(size_t tag) {
    const char type = source_[tag + 1];
    emit(Token::Kind::kText, text_before(tag));
    move_to(tag + 2);
    if (looking_at("-") || looking_at("+")) move_to(at_ + 1);
    if (type == '#') return read_comment();
    if (type == '%' && read_raw()) return;
    emit(type == '{' ? Token::Kind::kOutputBegin : Token::Kind::kBlockBegin, "");
    read_inside(type == '{' ? "}}" : "%}");
    emit(type == '{' ? Token::Kind::kOutputEnd : Token::Kind::kBlockEnd, "");
  }

  void read_comment() {
    const size_t end = source_.find("#}", at_);
    if (end == std::string::npos) fail("the comment that begins here has no '#}'");
    const char sign = end > at_ ? source_[end - 1] : ' ';
    move_to(end + 2);
    after_end(sign, true);
  }

  /// What an end tag swallows: "-" all white space, trim_blocks one newline unless there is a "+".
  void after_end(char sign, bool trims_newline) {
    if (sign == '-') {
      const std::string_view rest = std::string_view(source_).substr(at_);
      move_to(source_.size() - strip_space(rest, Side::kLeft).size());
    } else if (trims_newline && sign != '+' && looking_at("\n")) {
      move_to(at_ + 1);
    }
  }

  /// Whether a block tag that holds just `word` begins at `position`, which is after "{%" and its sign. If so
  /// `end` is after its "%}" and `sign` the character before that.
  bool is_bare_block(std::string_view word, size_t position, size_t& end, char& sign) const {
    const auto skip = [&] {
      while (position < source_.size() && is_blank(source_[position]))
        ++position;
    };
    skip();
    if (!std::string_view(source_).substr(position).starts_with(word)) return false;
    position += word.size();
    skip();
    sign = ' ';
    if (position < source_.size() && (source_[position] == '-' || source_[position] == '+'))
      sign = source_[position++];
    if (!std::string_view(source_).substr(position).starts_with("%}")) return false;
    end = position + 2;
    return true;
  }

  bool read_raw() {
    size_t end = 0;
    char sign = ' ';
    if (!is_bare_block("raw", at_, end, sign)) return false;
    const int begin_line = line_;
    move_to(end);
    after_end(sign, false);
    for (size_t tag = source_.find("{%", at_); tag != std::string::npos; tag = source_.find("{%", tag + 1)) {
      size_t inside = tag + 2;
      if (inside < source_.size() && (source_[inside] == '-' || source_[inside] == '+')) ++inside;
      if (!is_bare_block("endraw", inside, end, sign)) continue;
      emit(Token::Kind::kText, text_before(tag));
      move_to(end);
      after_end(sign, true);
      return true;
    }
    throw TemplateError(begin_line, "'raw' has no 'endraw'");
  }

  void read_inside(std::string_view closing) {
    const int begin_line = line_;
    std::string open;  // brackets that await their partner
    while (true) {
      while (at_ < source_.size() && is_blank(source_[at_]))
        move_to(at_ + 1);
      if (at_ == source_.size())
        throw TemplateError(begin_line, text("the tag that begins here has no '", closing, "'"));
      if (open.empty()) {
        const char sign = source_[at_] == '-' || source_[at_] == '+' ? source_[at_] : ' ';
        const bool may_sign = sign == '-' || (sign == '+' && closing == "%}");
        if (std::string_view(source_).substr(at_ + (may_sign ? 1 : 0)).starts_with(closing)) {
          move_to(at_ + (may_sign ? 3 : 2));
          return after_end(sign, closing == "%}");
        }
      }
      read_token(open);
    }
  }

  void read_token(std::string& open) {
    const char c = source_[at_];
    if (is_digit(c)) return read_number();
    if (is_name_start(c)) {
      size_t end = at_;
      while (end < source_.size() && (is_name_start(source_[end]) || is_digit(source_[end])))
        ++end;
      emit(Token::Kind::kName, source_.substr(at_, end - at_));
      return move_to(end);
    }
    if (c == '"' || c == '\'') return read_string(c);
    for (const std::string_view one : kOperators) {
      if (!looking_at(one)) continue;
      balance(one[0], open);
      emit(Token::Kind::kOperator, std::string(one));
      return move_to(at_ + one.size());
    }
    fail(text("unexpected character ",
              string_repr(characters(std::string_view(source_).substr(at_, 4)).front())));
  }

  void balance(char c, std::string& open) const {
    constexpr std::string_view kOpening = "([{", kClosing = ")]}";
    if (kOpening.find(c) != std::string_view::npos) open += c;
    const size_t closing = kClosing.find(c);
    if (closing == std::string_view::npos) return;
    if (open.empty() || open.back() != kOpening[closing]) fail(text("unexpected '", c, "'"));
    open.pop_back();
  }

  void read_number() {
    std::string digits;
    size_t end = at_;
    const auto take_digits = [&] {
      while (end < source_.size() &&
             (is_digit(source_[end]) ||
              (source_[end] == '_' && end + 1 < source_.size() && is_digit(source_[end + 1])))) {
        if (source_[end] != '_') digits += source_[end];
        ++end;
      }
    };
    const auto at = [&](size_t i) { return i < source_.size() ? source_[i] : '\0'; };
    take_digits();
    bool is_float = false;
    // After a dot, as in pairs.0.1, digits are indices.
    const bool after_dot =
        !tokens_.empty() && tokens_.back().kind == Token::Kind::kOperator && tokens_.back().text == ".";
    if (!after_dot && at(end) == '.' && is_digit(at(end + 1))) {
      is_float = true;
      digits += '.';
      ++end;
      take_digits();
    }
    if (!after_dot && (at(end) == 'e' || at(end) == 'E')) {
      const size_t sign = at(end + 1) == '+' || at(end + 1) == '-' ? 1 : 0;
      if (is_digit(at(end + 1 + sign))) {
        is_float = true;
        digits += source_.substr(end, 1 + sign);
        end += 1 + sign;
        take_digits();
      }
    }
    if (is_name_start(at(end))) fail("only decimal numbers are supported");
    emit(is_float ? Token::Kind::kFloat : Token::Kind::kInteger, digits);
    move_to(end);
  }

  void read_string(char quote) {
    std::string value;
    size_t i = at_ + 1;
    while (i < source_.size() && source_[i] != quote) {
      if (source_[i] == '\\') {
        ++i;
        read_escape(i, value);
      } else {
        value += source_[i++];
      }
    }
    if (i >= source_.size()) fail("the text that begins here has no closing quote");
    emit(Token::Kind::kString, std::move(value));
    move_to(i + 1);
  }

  /// The escape whose character after the backslash is at `i`; moves `i` behind it.
  void read_escape(size_t& i, std::string& value) const {
    if (i >= source_.size()) fail("the text that begins here has no closing quote");
    const char c = source_[i++];
    constexpr std::string_view kLetters = "\\'\"abfnrtv", kMeanings = "\\'\"\a\b\f\n\r\t\v";
    if (const size_t found = kLetters.find(c); found != std::string_view::npos) {
      value += kMeanings[found];
    } else if (c == 'x' || c == 'u' || c == 'U') {
      read_code_point(i, c == 'x' ? 2 : c == 'u' ? 4 : 8, value);
    } else if (c >= '0' && c <= '7') {
      uint32_t code = static_cast<uint32_t>(c - '0');
      for (int k = 0; k < 2 && i < source_.size() && source_[i] >= '0' && source_[i] <= '7'; ++k) {
        code = code * 8 + static_cast<uint32_t>(source_[i++] - '0');
      }
      value += utf8_of(code);
    } else if (c == 'N') {
      fail("the escape \\N{...} is not supported");
    } else if (c != '\n') {
      value += {'\\', c};  // as Python: an unknown escape stands for itself
    }
  }

  void read_code_point(size_t& i, int digits, std::string& value) const {
    uint64_t code = 0;
    for (int k = 0; k < digits; ++k, ++i) {
      const char c = i < source_.size() ? source_[i] : ' ';
      const int digit = is_digit(c)            ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) fail("an escape in a text has too few hexadecimal digits");
      code = code * 16 + static_cast<uint64_t>(digit);
    }
    if (code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) fail("an escape in a text names no character");
    value += utf8_of(static_cast<uint32_t>(code));
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) {
  return Lexer(source).run();
}

}  // namespace longhalo::jinja

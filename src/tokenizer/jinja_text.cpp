#include "tokenizer/jinja_text.hpp"

#include <charconv>
#include <cmath>
#include <cstdlib>

namespace longhalo::jinja {
namespace {

/// Bytes of the character at the start of `text`, which is not empty.
size_t character_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  const size_t length = lead < 0xC2 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 1;
  if (length > text.size()) return 1;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 1;
  }
  return length;
}

uint32_t code_point(std::string_view character) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(character[i])); };
  switch (character.size()) {
    case 2:
      return (byte(0) & 0x1F) << 6 | (byte(1) & 0x3F);
    case 3:
      return (byte(0) & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    case 4:
      return (byte(0) & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
    default:
      return byte(0);
  }
}

template <class Drops>
std::string_view strip(std::string_view text, Side side, Drops drops) {
  const std::vector<std::string_view> all = characters(text);
  size_t begin = 0, end = all.size();
  if (side != Side::kRight) {
    while (begin < end && drops(all[begin]))
      ++begin;
  }
  if (side != Side::kLeft) {
    while (end > begin && drops(all[end - 1]))
      --end;
  }
  if (begin == end) return {};
  return {all[begin].data(),
          static_cast<size_t>(all[end - 1].data() + all[end - 1].size() - all[begin].data())};
}

std::string hex(uint32_t value, int digits) {
  std::string out;
  for (int i = digits - 1; i >= 0; --i)
    out += "0123456789abcdef"[(value >> (4 * i)) & 15];
  return out;
}

}  // namespace

std::vector<std::string_view> characters(std::string_view text) {
  std::vector<std::string_view> all;
  while (!text.empty()) {
    const size_t length = character_length(text);
    all.push_back(text.substr(0, length));
    text.remove_prefix(length);
  }
  return all;
}

bool is_space(std::string_view character) {
  const uint32_t c = code_point(character);
  if (c >= 0x80 && character.size() == 1) return false;  // a stray byte
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

std::string_view strip_space(std::string_view text, Side side) {
  return strip(text, side, is_space);
}

std::string_view strip_set(std::string_view text, std::string_view set, Side side) {
  const std::vector<std::string_view> dropped = characters(set);
  return strip(text, side, [&](std::string_view character) {
    for (const std::string_view one : dropped) {
      if (one == character) return true;
    }
    return false;
  });
}

std::string utf8_of(uint32_t c) {
  const auto byte = [](uint32_t value) { return static_cast<char>(static_cast<unsigned char>(value)); };
  if (c < 0x80) return {byte(c)};
  if (c < 0x800) return {byte(0xC0 | c >> 6), byte(0x80 | (c & 0x3F))};
  if (c < 0x10000) return {byte(0xE0 | c >> 12), byte(0x80 | (c >> 6 & 0x3F)), byte(0x80 | (c & 0x3F))};
  return {byte(0xF0 | c >> 18), byte(0x80 | (c >> 12 & 0x3F)), byte(0x80 | (c >> 6 & 0x3F)),
          byte(0x80 | (c & 0x3F))};
}

std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto scientific = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific);
  std::string digits(buffer, scientific.ptr);
  const int exponent = std::atoi(digits.c_str() + digits.find('e') + 1);
  // Python switches to an exponent below 1e-4 and from 1e16 on.
  if (exponent < -4 || exponent >= 16) return digits;
  const auto fixed = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed);
  std::string out(buffer, fixed.ptr);
  if (out.find('.') == std::string::npos) out += ".0";
  return out;
}

std::string string_repr(std::string_view text) {
  const bool holds_single = text.find('\'') != std::string_view::npos;
  const char quote = holds_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string out(1, quote);
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == quote || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7F) {
      out += "\\x";
      out += hex(byte, 2);
    } else {
      out += c;
    }
  }
  return out + quote;
}

std::string json_string(std::string_view text, bool ascii_only) {
  std::string out = "\"";
  for (const std::string_view character : characters(text)) {
    const uint32_t c = code_point(character);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += character;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c == '\b') {
      out += "\\b";
    } else if (c == '\f') {
      out += "\\f";
    } else if (c < 0x20 || (ascii_only && c >= 0x80 && c < 0x10000)) {
      out += "\\u";
      out += hex(c, 4);
    } else if (ascii_only && c >= 0x10000) {
      out += "\\u";
      out += hex(0xD800 + ((c - 0x10000) >> 10), 4);
      out += "\\u";
      out += hex(0xDC00 + ((c - 0x10000) & 0x3FF), 4);
    } else {
      out += character;
    }
  }
  return out + '"';
}

}  // namespace longhalo::jinja

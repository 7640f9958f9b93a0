#include "config/faults.hpp"

#include <cctype>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {

std::string ValueSource::place(const YAML::Mark& mark) const {
  if (kind == Kind::kEnvironment) return "environment variable " + name;
  if (kind == Kind::kOverride || mark.line < 0) return name;
  return text(name, ":", mark.line + 1, ":", mark.column + 1);
}

std::string ValueSource::spell(std::string_view key) const {
  if (kind != Kind::kEnvironment) return std::string(key);
  std::string spelled = "LONGHALO_";
  for (const char c : key) {
    if (c == '.') {
      spelled += "__";
    } else {
      spelled += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    }
  }
  return spelled;
}

void ConfigFaults::add(std::string_view place, std::string_view what) {
  lines_.push_back(text(place, ": ", what));
}

void ConfigFaults::raise(std::string_view where) const {
  if (lines_.empty()) return;
  std::string all = lines_.size() == 1 ? std::string("the config has a fault:")
                                       : text("the config has ", lines_.size(), " faults:");
  for (const std::string& line : lines_)
    all += "\n    " + line;
  throw UserError(
      all, where,
      "correct each of them; configs/reference.yaml documents every key, its type and its default");
}

void ValueContext::fault(const YAML::Node& node, std::string_view what) const {
  const YAML::Mark mark = node.Mark();
  const bool is_empty_variable =
      source.kind == ValueSource::Kind::kEnvironment && node.IsScalar() && node.Scalar().empty();
  faults.add(source.place(mark.line < 0 ? key_mark : mark),
             text(source.spell(key), " ", what, is_empty_variable ? ", or unset the variable" : ""));
}

std::string in_quotes(std::string_view value) {
  constexpr size_t kLongest = 60;
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = "'";
  size_t taken = 0;
  for (const char c : value) {
    const auto byte = static_cast<unsigned char>(c);
    // Cut before a character, not inside its UTF-8 bytes.
    if (taken >= kLongest && (byte & 0xC0) != 0x80) {
      out += "...";
      break;
    }
    if (byte == '\n') {
      out += "\\n";
    } else if (byte == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7F) {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      out += c;
    }
    ++taken;
  }
  return out + "'";
}

}  // namespace longhalo

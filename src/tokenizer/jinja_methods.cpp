// Methods of texts, lists and maps, and the global functions.
#include <algorithm>
#include <ctime>

#include "core/text.hpp"
#include "tokenizer/jinja_builtins.hpp"
#include "tokenizer/jinja_text.hpp"

namespace longhalo::jinja {
namespace {

constexpr size_t kLargestText = size_t{4} << 20;
constexpr int64_t kLargestRange = 100000;  // as Jinja's sandbox

bool is_upper(char c) {
  return c >= 'A' && c <= 'Z';
}
bool is_lower(char c) {
  return c >= 'a' && c <= 'z';
}
char to_upper(char c) {
  return is_lower(c) ? static_cast<char>(c - 32) : c;
}
char to_lower(char c) {
  return is_upper(c) ? static_cast<char>(c + 32) : c;
}

/// Where a method looks: a text, or a tuple of texts any of which will do.
std::vector<std::string> one_or_more(const Value& wanted) {
  std::vector<std::string> all;
  const auto add = [&](const Value& one) {
    if (!one.is<std::string>()) throw ValueError(text("a text is sought, not ", one.kind()));
    all.push_back(one.string());
  };
  if (wanted.is_list()) {
    for (const Value& one : wanted.list().items)
      add(one);
  } else {
    add(wanted);
  }
  return all;
}

List strings_to_list(const std::vector<std::string_view>& parts) {
  List list;
  for (const std::string_view part : parts)
    list.items.emplace_back(part);
  return list;
}

/// str.split() without a separator: runs of white space divide.
std::vector<std::string_view> split_space(std::string_view text, int64_t most) {
  std::vector<std::string_view> parts;
  text = strip_space(text, Side::kLeft);
  while (!text.empty()) {
    if (most >= 0 && static_cast<int64_t>(parts.size()) == most) {
      parts.push_back(strip_space(text, Side::kRight));
      break;
    }
    size_t end = 0;
    for (const std::string_view one : characters(text)) {
      if (is_space(one)) break;
      end += one.size();
    }
    parts.push_back(text.substr(0, end));
    text = strip_space(text.substr(end), Side::kLeft);
  }
  return parts;
}

std::vector<std::string_view> split_at(std::string_view text, std::string_view separator, int64_t most) {
  std::vector<std::string_view> parts;
  size_t at = text.find(separator);
  while (at != std::string_view::npos && (most < 0 || static_cast<int64_t>(parts.size()) < most)) {
    parts.push_back(text.substr(0, at));
    text.remove_prefix(at + separator.size());
    at = text.find(separator);
  }
  parts.push_back(text);
  return parts;
}

std::vector<std::string_view> split_at_from_right(std::string_view text, std::string_view separator,
                                                  int64_t most) {
  std::vector<std::string_view> parts;
  size_t at = text.rfind(separator);
  while (at != std::string_view::npos && (most < 0 || static_cast<int64_t>(parts.size()) < most)) {
    parts.push_back(text.substr(at + separator.size()));
    text = text.substr(0, at);
    at = text.size() < separator.size() ? std::string_view::npos : text.rfind(separator);
  }
  parts.push_back(text);
  std::reverse(parts.begin(), parts.end());
  return parts;
}

Value split(std::string_view value, const Arguments& arguments, Side from) {
  arguments.check("split", {"sep", "maxsplit"});
  const Value separator = arguments.get(0, "sep", None{});
  const int64_t most = arguments.get_whole(1, "maxsplit", -1);
  if (separator.is<None>()) {
    if (from == Side::kRight && most >= 0)
      throw ValueError("rsplit of white space with maxsplit is not supported");
    return strings_to_list(split_space(value, most));
  }
  const std::string sought = arguments.get_text(0, "sep", "");
  if (sought.empty()) throw ValueError("split takes a separator that is not empty");
  return strings_to_list(from == Side::kLeft ? split_at(value, sought, most)
                                             : split_at_from_right(value, sought, most));
}

std::vector<std::string_view> split_lines(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = text.find_first_of("\n\r");
    if (end == std::string_view::npos) {
      lines.push_back(text);
      break;
    }
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end + (text.substr(end).starts_with("\r\n") ? 2 : 1));
  }
  return lines;
}

Value strip(std::string_view value, const Arguments& arguments, Side side) {
  arguments.check("strip", {"chars"});
  if (arguments.get(0, "chars", None{}).is<None>()) return strip_space(value, side);
  return strip_set(value, arguments.get_text(0, "chars", ""), side);
}

/// Character index of a byte offset that find() gave.
int64_t character_index(std::string_view text, size_t offset) {
  return offset == std::string_view::npos ? -1
                                          : static_cast<int64_t>(characters(text.substr(0, offset)).size());
}

int64_t count_of(std::string_view text, std::string_view sought) {
  if (sought.empty()) return static_cast<int64_t>(characters(text).size()) + 1;
  return static_cast<int64_t>(split_at(text, sought, -1).size()) - 1;
}

Value call_text_method(const std::string& value, const std::string& name, const Arguments& arguments) {
  const auto sought = [&] {
    arguments.check(name, {"text"}, 1);
    return arguments.get_text(0, "text", "");
  };
  const auto no_arguments = [&] { arguments.check(name, {}); };
  if (name == "strip") return strip(value, arguments, Side::kBoth);
  if (name == "lstrip") return strip(value, arguments, Side::kLeft);
  if (name == "rstrip") return strip(value, arguments, Side::kRight);
  if (name == "split") return split(value, arguments, Side::kLeft);
  if (name == "rsplit") return split(value, arguments, Side::kRight);
  if (name == "startswith" || name == "endswith") {
    arguments.check(name, {"text"}, 1);
    const std::vector<std::string> any = one_or_more(arguments.first());
    return std::any_of(any.begin(), any.end(), [&](const std::string& one) {
      return name == "startswith" ? value.starts_with(one) : value.ends_with(one);
    });
  }
  if (name == "replace") {
    arguments.check(name, {"old", "new", "count"}, 2);
    return replaced(value, arguments.get_text(0, "old", ""), arguments.get_text(1, "new", ""),
                    arguments.get_whole(2, "count", -1));
  }
  if (name == "join") {
    arguments.check(name, {"list"}, 1);
    std::string joined;
    bool is_first = true;
    for (const Value& item : iterate(arguments.first())) {
      if (!item.is<std::string>()) throw ValueError(text("the method join takes texts, not ", item.kind()));
      joined += (is_first ? "" : value) + item.string();
      is_first = false;
    }
    return joined;
  }
  if (name == "find") return character_index(value, value.find(sought()));
  if (name == "rfind") return character_index(value, value.rfind(sought()));
  if (name == "index") {
    const int64_t found = character_index(value, value.find(sought()));
    if (found < 0) throw ValueError("index: the text is not there");
    return found;
  }
  if (name == "count") return count_of(value, sought());
  if (name == "removeprefix") {
    const std::string prefix = sought();
    return value.starts_with(prefix) ? value.substr(prefix.size()) : value;
  }
  if (name == "removesuffix") {
    const std::string suffix = sought();
    return value.ends_with(suffix) ? value.substr(0, value.size() - suffix.size()) : value;
  }
  no_arguments();
  if (name == "splitlines") return strings_to_list(split_lines(value));
  if (name == "upper") return in_case(value, Case::kUpper);
  if (name == "lower") return in_case(value, Case::kLower);
  if (name == "title") return in_case(value, Case::kTitleMethod);
  if (name == "capitalize") return in_case(value, Case::kCapitalize);
  if (name == "isdigit") {
    return !value.empty() &&
           std::all_of(value.begin(), value.end(), [](char c) { return c >= '0' && c <= '9'; });
  }
  if (name == "isspace") return !value.empty() && strip_space(value, Side::kLeft).empty();
  throw ValueError(text("the method '", name, "' of a text is not supported"));
}

Value call_dict_method(const Dict& value, const std::string& name, const Arguments& arguments) {
  if (name == "get") {
    arguments.check(name, {"key", "default"}, 1);
    const Value* found = value.find(arguments.first());
    return found == nullptr ? arguments.get(1, "default", None{}) : *found;
  }
  arguments.check(name, {});
  List list;
  for (const auto& [key, entry] : value.entries) {
    if (name == "keys") {
      list.items.push_back(key);
    } else if (name == "values") {
      list.items.push_back(entry);
    } else {
      list.items.emplace_back(List{{key, entry}, true});
    }
  }
  return list;
}

Value call_list_method(const List& value, const std::string& name, const Arguments& arguments) {
  arguments.check(name, {"item"}, 1);
  const Value& item = arguments.first();
  if (name == "count") return static_cast<int64_t>(std::count(value.items.begin(), value.items.end(), item));
  const auto found = std::find(value.items.begin(), value.items.end(), item);
  if (found == value.items.end()) throw ValueError("index: the item is not in the list");
  return static_cast<int64_t>(found - value.items.begin());
}

Value range(const Arguments& arguments) {
  arguments.check("range", {"start", "stop", "step"}, 1);
  const bool has_start = arguments.positional.size() > 1;
  const int64_t start = has_start ? arguments.get_whole(0, "start", 0) : 0;
  const int64_t stop = arguments.get_whole(has_start ? 1 : 0, "stop", 0);
  const int64_t step = arguments.get_whole(2, "step", 1);
  if (step == 0) throw ValueError("range takes a step other than 0");
  constexpr int64_t kFar = int64_t{1} << 40;
  if (std::min({start, stop, step}) < -kFar || std::max({start, stop, step}) > kFar) {
    throw ValueError("range takes smaller numbers");
  }
  const int64_t count = step > 0 ? (stop - start + step - 1) / step : (start - stop - step - 1) / -step;
  if (count > kLargestRange) throw ValueError(text("range gives more than ", kLargestRange, " numbers"));
  List list;
  for (int64_t i = 0; i < count; ++i)
    list.items.emplace_back(start + i * step);
  return list;
}

std::string formatted_date(const std::string& format, const Date& today) {
  std::tm time{};
  time.tm_year = today.year - 1900;
  time.tm_mon = today.month - 1;
  time.tm_mday = today.day;
  time.tm_isdst = -1;
  std::mktime(&time);  // finds the day of the week and of the year
  time.tm_hour = 0;
  if (format.empty()) return "";
  char buffer[512];
  const size_t written = std::strftime(buffer, sizeof buffer, format.c_str(), &time);
  if (written == 0) throw ValueError("strftime_now takes a shorter format");
  return std::string(buffer, written);
}

Dict dict_of(std::string_view function, const Arguments& arguments) {
  Dict dict;
  if (arguments.positional.size() > 1) throw ValueError(text(function, " takes one map at most"));
  if (!arguments.positional.empty()) {
    if (!arguments.positional[0].is_dict()) throw ValueError(text(function, " takes a map"));
    dict = arguments.positional[0].dict();
  }
  for (const auto& [key, value] : arguments.keywords)
    dict.set(key, value);
  return dict;
}

}  // namespace

std::string in_case(std::string_view value, Case wanted) {
  std::string out;
  bool starts = true;
  for (const char c : value) {
    if (static_cast<unsigned char>(c) >= 0x80)
      throw ValueError("the case of letters beyond ASCII is not supported");
    const bool to_top = wanted == Case::kUpper || (wanted != Case::kLower && starts);
    out += to_top ? to_upper(c) : to_lower(c);
    if (wanted == Case::kCapitalize) starts = false;
    if (wanted == Case::kTitleMethod) starts = !is_upper(c) && !is_lower(c);
    // The filter's words end at white space and opening brackets; a hyphen ends one too, an apostrophe does
    // not.
    if (wanted == Case::kTitleFilter)
      starts =
          is_space(std::string_view(&c, 1)) || std::string_view("-({[<").find(c) != std::string_view::npos;
  }
  return out;
}

std::string replaced(std::string_view value, std::string_view old, std::string_view fresh, int64_t count) {
  if (old.empty()) throw ValueError("replace takes a text to seek that is not empty");
  std::string out;
  bool is_first = true;
  for (const std::string_view part : split_at(value, old, count)) {
    if (!is_first) out += fresh;
    out += part;
    check_text_size(out.size());
    is_first = false;
  }
  return out;
}

void check_text_size(size_t bytes) {
  if (bytes > kLargestText)
    throw ValueError(text("a text of the template grows beyond ", kLargestText, " bytes"));
}

Value call_method(const Value& receiver, const std::string& name, const Arguments& arguments) {
  if (receiver.is<std::string>()) return call_text_method(receiver.string(), name, arguments);
  if (receiver.is_dict()) return call_dict_method(receiver.dict(), name, arguments);
  if (receiver.is_list()) return call_list_method(receiver.list(), name, arguments);
  throw ValueError(text("the method '", name, "' of a ", receiver.kind(), " is not supported"));
}

std::vector<std::string> global_functions() {
  return {"range", "namespace", "dict", "raise_exception", "strftime_now"};
}

Value call_global(const std::string& name, const Arguments& arguments, const Date& today) {
  if (name == "range") return range(arguments);
  if (name == "namespace") return Namespace{dict_of(name, arguments)};
  if (name == "dict") return dict_of(name, arguments);
  arguments.check(name, {"text"}, 1);
  const std::string argument = arguments.positional.empty() ? "" : arguments.positional[0].str();
  if (name == "raise_exception") throw RaisedException(argument);
  return formatted_date(argument, today);
}

}  // namespace longhalo::jinja

// Filters and tests.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "core/text.hpp"
#include "tokenizer/jinja_builtins.hpp"
#include "tokenizer/jinja_text.hpp"

namespace longhalo::jinja {
namespace {

/// "a.b.0" of a value, as the attribute argument of filters.
Value get_path(const Value& value, const Value& path) {
  if (path.is_whole()) return get_item(value, path);
  if (!path.is<std::string>()) throw ValueError(text("an attribute's name is a text, not ", path.kind()));
  Value at = value;
  std::string_view rest = path.string();
  while (true) {
    const size_t dot = rest.find('.');
    const std::string_view part = rest.substr(0, dot);
    const bool is_index = !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    int64_t index = 0;
    if (is_index && std::from_chars(part.data(), part.data() + part.size(), index).ec == std::errc{}) {
      at = get_item(at, index);
    } else {
      at = get_item(at, std::string(part));
    }
    if (dot == std::string_view::npos) return at;
    rest.remove_prefix(dot + 1);
  }
}

std::optional<double> parsed_real(const std::string& value) {
  const std::string_view digits = strip_space(value, Side::kBoth);
  double number = 0;
  const size_t sign = digits.starts_with('+') ? 1 : 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data() + sign, end, number);
  if (error != std::errc{} || stop != end || digits.size() == sign) return std::nullopt;
  return number;
}

std::optional<int64_t> parsed_whole(const std::string& value) {
  const std::string_view digits = strip_space(value, Side::kBoth);
  int64_t number = 0;
  const size_t sign = digits.starts_with('+') ? 1 : 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data() + sign, end, number);
  if (error != std::errc{} || stop != end) return std::nullopt;
  return number;
}

std::optional<int64_t> truncated(double value) {
  if (!(std::fabs(value) < 9.2e18)) return std::nullopt;
  return static_cast<int64_t>(value);
}

Value to_whole(const Value& value, const Arguments& arguments) {
  arguments.check("int", {"default"});
  if (value.is<Undefined>()) throw ValueError(text("'", value.undefined().name, "' is undefined"));
  std::optional<int64_t> number;
  if (value.is_whole()) number = value.whole();
  if (value.is<double>()) number = truncated(value.real());
  if (value.is<std::string>()) {
    number = parsed_whole(value.string());
    if (const auto real = parsed_real(value.string()); !number && real) number = truncated(*real);
  }
  return number ? Value(*number) : arguments.get(0, "default", int64_t{0});
}

Value to_real(const Value& value, const Arguments& arguments) {
  arguments.check("float", {"default"});
  if (value.is<Undefined>()) throw ValueError(text("'", value.undefined().name, "' is undefined"));
  if (value.is_number()) return value.real();
  const auto number = value.is<std::string>() ? parsed_real(value.string()) : std::nullopt;
  return number ? Value(*number) : arguments.get(0, "default", 0.0);
}

Value json_of(const Value& value, const Arguments& arguments) {
  arguments.check("tojson", {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  // A lone positional argument is the indent in Jinja itself and ensure_ascii in transformers: too doubtful
  // to guess.
  if (!arguments.positional.empty()) throw ValueError("tojson takes its arguments by name only here");
  style.ascii_only = arguments.get(0, "ensure_ascii", false).truth();
  style.sort_keys = arguments.get(3, "sort_keys", false).truth();
  if (const Value indent = arguments.get(1, "indent", None{}); !indent.is<None>()) {
    style.indent = arguments.get_whole(1, "indent", 0);
    if (style.indent < 0 || style.indent > 100) throw ValueError("tojson takes an indent of 0 to 100");
  }
  if (const Value separators = arguments.get(2, "separators", None{}); !separators.is<None>()) {
    const std::vector<Value> both = iterate(separators);
    if (both.size() != 2) throw ValueError("tojson takes two separators");
    style.item_separator = both[0].str();
    style.key_separator = both[1].str();
  }
  return to_json(value, style);
}

Value join(const Value& value, const Arguments& arguments) {
  arguments.check("join", {"d", "attribute"});
  const std::string separator = arguments.get(0, "d", "").str();
  const Value attribute = arguments.get(1, "attribute", None{});
  std::string joined;
  bool is_first = true;
  for (const Value& item : iterate(value)) {
    if (!is_first) joined += separator;
    joined += attribute.is<None>() ? item.str() : get_path(item, attribute).str();
    check_text_size(joined.size());
    is_first = false;
  }
  return joined;
}

/// What select, reject and map visit: as in Jinja nothing of what counts as false, whatever it is.
std::vector<Value> iterate_unless_false(const Value& value) {
  return value.truth() ? iterate(value) : std::vector<Value>();
}

enum class Keep { kPassing, kFailing };

bool keeps(const Value& tested, const Arguments& arguments, size_t test_at, Keep keep) {
  bool passes = tested.truth();
  if (arguments.positional.size() > test_at) {
    const Value& test = arguments.positional[test_at];
    if (!test.is<std::string>()) throw ValueError(text("a test's name is a text, not ", test.kind()));
    Arguments rest;
    rest.positional.assign(arguments.positional.begin() + static_cast<std::ptrdiff_t>(test_at) + 1,
                           arguments.positional.end());
    passes = apply_test(test.string(), tested, rest);
  }
  return passes == (keep == Keep::kPassing);
}

/// select and reject, and with an attribute selectattr and rejectattr.
Value select(const std::string& name, const Value& value, const Arguments& arguments) {
  if (!arguments.keywords.empty()) throw ValueError(text(name, " has no argument with a name here"));
  const bool by_attribute = name.ends_with("attr");
  if (by_attribute && arguments.positional.empty())
    throw ValueError(text(name, " lacks the attribute's name"));
  const Keep keep = name.starts_with("select") ? Keep::kPassing : Keep::kFailing;
  List kept;
  for (const Value& item : iterate_unless_false(value)) {
    const Value tested = by_attribute ? get_path(item, arguments.positional[0]) : item;
    if (keeps(tested, arguments, by_attribute ? 1 : 0, keep)) kept.items.push_back(item);
  }
  return kept;
}

Value map(const Value& value, const Arguments& arguments) {
  List mapped;
  if (arguments.positional.empty()) {
    arguments.check("map", {"attribute", "default"});
    const Value* attribute = arguments.find(0, "attribute");
    if (attribute == nullptr) throw ValueError("map lacks a filter's name or an attribute");
    const Value otherwise = arguments.get(1, "default", Undefined{"default"});
    for (const Value& item : iterate_unless_false(value)) {
      const Value found = get_path(item, *attribute);
      mapped.items.push_back(found.is<Undefined>() && !otherwise.is<Undefined>() ? otherwise : found);
    }
    return mapped;
  }
  if (!arguments.positional[0].is<std::string>()) throw ValueError("map takes a filter's name");
  Arguments rest{{arguments.positional.begin() + 1, arguments.positional.end()}, arguments.keywords};
  for (const Value& item : iterate_unless_false(value)) {
    mapped.items.push_back(apply_filter(arguments.positional[0].string(), item, rest));
  }
  return mapped;
}

Value sorted(const Value& value, const Arguments& arguments) {
  arguments.check("sort", {"reverse", "case_sensitive", "attribute"});
  const bool exact = arguments.get(1, "case_sensitive", false).truth();
  const Value attribute = arguments.get(2, "attribute", None{});
  const bool reverse = arguments.get(0, "reverse", false).truth();
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : iterate(value)) {
    Value key = attribute.is<None>() ? item : get_path(item, attribute);
    if (!exact && key.is<std::string>()) key = in_case(key.string(), Case::kLower);
    keyed.emplace_back(std::move(key), item);
  }
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return reverse ? compare(b.first, a.first) < 0 : compare(a.first, b.first) < 0;
  });
  List list;
  for (auto& [key, item] : keyed)
    list.items.push_back(std::move(item));
  return list;
}

Value reversed(const Value& value) {
  std::vector<Value> items = iterate(value);
  std::reverse(items.begin(), items.end());
  if (!value.is<std::string>()) return List{std::move(items)};
  std::string joined;
  for (const Value& one : items)
    joined += one.string();
  return joined;
}

Value absolute(const Value& value) {
  if (value.is<double>()) return std::fabs(value.real());
  if (!value.is_whole()) throw ValueError(text("abs takes a number, not ", value.kind()));
  return value.whole() < 0 ? negated(value) : Value(value.whole());
}

}  // namespace

Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments) {
  if (name == "default" || name == "d") {
    arguments.check(name, {"default_value", "boolean"});
    const bool also_false = arguments.get(1, "boolean", false).truth();
    const bool is_missing = value.is<Undefined>() || (also_false && !value.truth());
    return is_missing ? arguments.get(0, "default_value", "") : value;
  }
  if (name == "trim") {
    arguments.check(name, {"chars"});
    const std::string whole = value.str();
    if (arguments.get(0, "chars", None{}).is<None>()) return strip_space(whole, Side::kBoth);
    return strip_set(whole, arguments.get_text(0, "chars", ""), Side::kBoth);
  }
  if (name == "replace") {
    arguments.check(name, {"old", "new", "count"}, 2);
    return replaced(value.str(), arguments.get(0, "old", "").str(), arguments.get(1, "new", "").str(),
                    arguments.get_whole(2, "count", -1));
  }
  if (name == "int") return to_whole(value, arguments);
  if (name == "float") return to_real(value, arguments);
  if (name == "tojson") return json_of(value, arguments);
  if (name == "join") return join(value, arguments);
  if (name == "map") return map(value, arguments);
  if (name == "sort") return sorted(value, arguments);
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr") {
    return select(name, value, arguments);
  }
  arguments.check(name, {});
  if (name == "length" || name == "count") return length(value);
  if (name == "string" || name == "safe") return value.str();
  if (name == "upper") return in_case(value.str(), Case::kUpper);
  if (name == "lower") return in_case(value.str(), Case::kLower);
  if (name == "title") return in_case(value.str(), Case::kTitleFilter);
  if (name == "capitalize") return in_case(value.str(), Case::kCapitalize);
  if (name == "list") return List{iterate(value)};
  if (name == "reverse") return reversed(value);
  if (name == "abs") return absolute(value);
  if (name == "items") {
    if (value.is<Undefined>()) return List{};
    if (!value.is_dict()) throw ValueError(text("items takes a map, not ", value.kind()));
    return call_method(value, "items", {});
  }
  if (name == "first" || name == "last") {
    const std::vector<Value> items = iterate(value);
    if (items.empty()) return Undefined{text("the ", name, " item of nothing")};
    return name == "first" ? items.front() : items.back();
  }
  throw ValueError(text("the filter '", name, "' is not supported"));
}

bool apply_test(const std::string& name, const Value& value, const Arguments& arguments) {
  const auto other = [&]() -> const Value& {
    arguments.check(name, {"other"}, 1);
    return arguments.first();
  };
  if (name == "eq" || name == "equalto" || name == "==") return value == other();
  if (name == "ne" || name == "!=") return !(value == other());
  if (name == "lt" || name == "<" || name == "lessthan") return compare(value, other()) < 0;
  if (name == "le" || name == "<=") return compare(value, other()) <= 0;
  if (name == "gt" || name == ">" || name == "greaterthan") return compare(value, other()) > 0;
  if (name == "ge" || name == ">=") return compare(value, other()) >= 0;
  if (name == "in") return contains(other(), value);
  if (name == "sameas") {
    // For what has one instance each; of others identity is an accident of the implementation.
    const Value& same = other();
    if (!same.is<bool>() && !same.is<None>()) throw ValueError("sameas takes true, false or none only");
    return same.is<bool>() ? value.is<bool>() && value == same : value.is<None>();
  }
  if (name == "divisibleby") {
    if (!value.is_whole() || !other().is_whole() || other().whole() == 0) {
      throw ValueError("divisibleby takes whole numbers, and not 0");
    }
    return other().whole() == -1 || value.whole() % other().whole() == 0;
  }
  arguments.check(name, {});
  if (name == "defined") return !value.is<Undefined>();
  if (name == "undefined") return value.is<Undefined>();
  if (name == "none") return value.is<None>();
  if (name == "string") return value.is<std::string>();
  if (name == "mapping") return value.is_dict();
  if (name == "sequence" || name == "iterable") {
    return value.is<std::string>() || value.is_list() || value.is_dict() || value.is<Undefined>();
  }
  if (name == "number") return value.is_number();
  if (name == "integer") return value.is<int64_t>();
  if (name == "float") return value.is<double>();
  if (name == "boolean") return value.is<bool>();
  if (name == "true") return value.is<bool>() && value.truth();
  if (name == "false") return value.is<bool>() && !value.truth();
  if (name == "callable") return value.is<Callable>() || value.is<Undefined>();  // as in Jinja
  if (name == "odd" || name == "even") {
    if (!value.is_number()) throw ValueError(text(name, " takes a number, not ", value.kind()));
    const double rest = std::fabs(std::fmod(value.real(), 2));
    if (!value.is_whole()) return rest == (name == "odd" ? 1 : 0);
    return (value.whole() % 2 != 0) == (name == "odd");
  }
  throw ValueError(text("the test '", name, "' is not supported"));
}

}  // namespace longhalo::jinja

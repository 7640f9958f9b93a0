#include "tokenizer/jinja_value.hpp"

#include <algorithm>
#include <cmath>

#include "core/text.hpp"
#include "tokenizer/jinja_text.hpp"

namespace longhalo::jinja {
namespace {

constexpr int64_t kBudgetBytes = int64_t{256} << 20;
constexpr int64_t kValueBytes = 32;
constexpr int kMostDepth = 100;

thread_local int64_t budget_left = 0;
thread_local bool has_budget = false;

}  // namespace

Budget::Budget() {
  budget_left = kBudgetBytes;
  has_budget = true;
}
Budget::~Budget() {
  has_budget = false;
}

void Value::charge() const {
  if (!has_budget) return;
  budget_left -= kValueBytes + (is<std::string>() ? static_cast<int64_t>(string().size()) : 0);
  if (budget_left < 0) throw ValueError("the template makes and copies too much; does it loop for ever?");
}

int Value::depth_inside() const {
  int depth = 0;
  if (is_list()) depth = list().depth;
  if (is_dict()) depth = dict().depth;
  if (is<Callable>() && callable().receiver != nullptr) depth = 1 + callable().receiver->depth_inside();
  if (is_namespace()) throw ValueError("a namespace inside another value is not supported");
  if (depth >= kMostDepth) throw ValueError("values are nested too deeply");
  return depth;
}

Value::Value(List list) {
  for (const Value& item : list.items)
    list.depth = std::max(list.depth, 1 + item.depth_inside());
  storage_ = std::make_shared<List>(std::move(list));
}

Value::Value(Dict dict) {
  for (const auto& [key, value] : dict.entries)
    dict.depth = std::max({dict.depth, 1 + key.depth_inside(), 1 + value.depth_inside()});
  storage_ = std::make_shared<Dict>(std::move(dict));
}
namespace {

constexpr int kDeepest = 100;

std::string repr_at(const Value& value, int depth) {
  if (depth > kDeepest) throw ValueError("a value is nested too deeply to print");
  if (value.is<std::string>()) return string_repr(value.string());
  std::string out;
  const auto separate = [&] {
    if (!out.empty()) out += ", ";
  };
  if (value.is_list()) {
    for (const Value& item : value.list().items) {
      separate();
      out += repr_at(item, depth + 1);
    }
    if (!value.list().is_tuple) return text("[", out, "]");
    return text("(", out, value.list().items.size() == 1 ? ",)" : ")");
  }
  if (value.is_dict()) {
    for (const auto& [key, entry] : value.dict().entries) {
      separate();
      out += text(repr_at(key, depth + 1), ": ", repr_at(entry, depth + 1));
    }
    return text("{", out, "}");
  }
  if (value.is<Undefined>()) return "Undefined";
  return value.str();
}

class JsonWriter {
 public:
  explicit JsonWriter(const JsonStyle& style) : style_(style) {
    comma_ = !style.item_separator.empty() ? style.item_separator : style.indent >= 0 ? "," : ", ";
    colon_ = !style.key_separator.empty() ? style.key_separator : ": ";
  }

  std::string write(const Value& value, int depth) {
    if (depth > kDeepest) throw ValueError("a value is nested too deeply for tojson");
    if (value.is<None>()) return "null";
    if (value.is<bool>()) return value.truth() ? "true" : "false";
    if (value.is<int64_t>()) return std::to_string(value.whole());
    if (value.is<double>()) return number(value.real());
    if (value.is<std::string>()) return json_string(value.string(), style_.ascii_only);
    if (value.is_list()) {
      std::string out;
      for (const Value& item : value.list().items)
        add(out, write(item, depth + 1), depth);
      return wrapped("[", out, "]", depth);
    }
    if (value.is_dict()) {
      auto entries = value.dict().entries;
      if (style_.sort_keys) {
        std::stable_sort(entries.begin(), entries.end(),
                         [](const auto& a, const auto& b) { return compare(a.first, b.first) < 0; });
      }
      std::string out;
      for (const auto& [key, entry] : entries) {
        add(out, text(json_string(key_text(key), style_.ascii_only), colon_, write(entry, depth + 1)), depth);
      }
      return wrapped("{", out, "}", depth);
    }
    throw ValueError(text("tojson cannot write ", value.kind()));
  }

 private:
  static std::string number(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
    return float_repr(value);
  }
  /// JSON's keys are texts; numbers, booleans and none become theirs.
  std::string key_text(const Value& key) {
    if (key.is<std::string>()) return key.string();
    if (key.is_number() || key.is<None>()) return write(key, 0);
    throw ValueError(text("tojson cannot write a map with a ", key.kind(), " as a key"));
  }
  std::string new_line(int depth) const {
    if (style_.indent < 0) return "";
    return text("\n", std::string(static_cast<size_t>(style_.indent * depth), ' '));
  }
  void add(std::string& out, const std::string& item, int depth) const {
    if (!out.empty()) out += comma_;
    out += new_line(depth + 1) + item;
  }
  std::string wrapped(const char* open, const std::string& inside, const char* close, int depth) const {
    return inside.empty() ? text(open, close) : text(open, inside, new_line(depth), close);
  }

  const JsonStyle& style_;
  std::string comma_;
  std::string colon_;
};

}  // namespace

const Value* Dict::find(const Value& key) const {
  for (const auto& [known, value] : entries) {
    if (known == key) return &value;
  }
  return nullptr;
}

void Dict::set(const Value& key, Value value) {
  for (auto& [known, old] : entries) {
    if (known == key) {
      old = std::move(value);
      return;
    }
  }
  entries.emplace_back(key, std::move(value));
}

bool Value::truth() const {
  if (is<Undefined>() || is<None>()) return false;
  if (is_whole()) return whole() != 0;
  if (is<double>()) return real() != 0;
  if (is<std::string>()) return !string().empty();
  if (is_list()) return !list().items.empty();
  if (is_dict()) return !dict().entries.empty();
  return true;
}

std::string Value::str() const {
  if (is<Undefined>()) return "";
  if (is<None>()) return "None";
  if (is<bool>()) return truth() ? "True" : "False";
  if (is<int64_t>()) return std::to_string(whole());
  if (is<double>()) return float_repr(real());
  if (is<std::string>()) return string();
  if (is_list() || is_dict()) return repr_at(*this, 0);
  throw ValueError(text("a ", kind(), " cannot be printed"));
}

std::string Value::repr() const {
  return repr_at(*this, 0);
}

std::string_view Value::kind() const {
  if (is<Undefined>()) return "undefined";
  if (is<None>()) return "none";
  if (is<bool>()) return "boolean";
  if (is<int64_t>()) return "whole number";
  if (is<double>()) return "number";
  if (is<std::string>()) return "text";
  if (is_list()) return list().is_tuple ? "tuple" : "list";
  if (is_dict()) return "map";
  if (is_namespace()) return "namespace";
  return "function";
}

bool operator==(const Value& a, const Value& b) {
  if (a.is_whole() && b.is_whole()) return a.whole() == b.whole();
  if (a.is_number() && b.is_number()) return a.real() == b.real();
  if (a.is<std::string>() && b.is<std::string>()) return a.string() == b.string();
  if (a.is_list() && b.is_list()) {
    return a.list().is_tuple == b.list().is_tuple && a.list().items == b.list().items;
  }
  if (a.is_dict() && b.is_dict()) {
    const Dict& left = a.dict();
    const Dict& right = b.dict();
    return left.entries.size() == right.entries.size() &&
           std::all_of(left.entries.begin(), left.entries.end(), [&](const auto& entry) {
             const Value* other = right.find(entry.first);
             return other != nullptr && *other == entry.second;
           });
  }
  if (a.is_namespace() && b.is_namespace()) return &a.space() == &b.space();
  return (a.is<None>() && b.is<None>()) || (a.is<Undefined>() && b.is<Undefined>());
}

int compare(const Value& a, const Value& b) {
  if (a.is_whole() && b.is_whole()) return a.whole() < b.whole() ? -1 : a.whole() > b.whole() ? 1 : 0;
  if (a.is_number() && b.is_number()) return a.real() < b.real() ? -1 : a.real() > b.real() ? 1 : 0;
  // The bytes of UTF-8 are in the order of the code points.
  if (a.is<std::string>() && b.is<std::string>()) return a.string().compare(b.string());
  if (a.is_list() && b.is_list() && a.list().is_tuple == b.list().is_tuple) {
    const std::vector<Value>& left = a.list().items;
    const std::vector<Value>& right = b.list().items;
    for (size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
      if (!(left[i] == right[i])) return compare(left[i], right[i]);
    }
    return left.size() < right.size() ? -1 : left.size() > right.size() ? 1 : 0;
  }
  throw ValueError(text("a ", a.kind(), " and a ", b.kind(), " cannot be compared"));
}

int64_t length(const Value& value) {
  if (value.is<Undefined>()) return 0;
  if (value.is<std::string>()) return static_cast<int64_t>(characters(value.string()).size());
  if (value.is_list()) return static_cast<int64_t>(value.list().items.size());
  if (value.is_dict()) return static_cast<int64_t>(value.dict().entries.size());
  throw ValueError(text("a ", value.kind(), " has no length"));
}

std::vector<Value> iterate(const Value& value) {
  std::vector<Value> items;
  if (value.is<Undefined>()) return items;
  if (value.is_list()) return value.list().items;
  if (value.is_dict()) {
    for (const auto& [key, entry] : value.dict().entries)
      items.push_back(key);
    return items;
  }
  if (value.is<std::string>()) {
    for (const std::string_view one : characters(value.string()))
      items.emplace_back(one);
    return items;
  }
  throw ValueError(text("a ", value.kind(), " cannot be looped over"));
}

bool contains(const Value& container, const Value& item) {
  if (container.is<std::string>()) {
    if (!item.is<std::string>()) throw ValueError(text("a ", item.kind(), " cannot be sought in a text"));
    return container.string().find(item.string()) != std::string::npos;
  }
  if (container.is_dict()) {
    if (item.is_dict() || (item.is_list() && !item.list().is_tuple)) {
      throw ValueError(text("a ", item.kind(), " is no key of a map"));
    }
    return container.dict().find(item) != nullptr;
  }
  const std::vector<Value> items = iterate(container);
  return std::find(items.begin(), items.end(), item) != items.end();
}

std::string to_json(const Value& value, const JsonStyle& style) {
  return JsonWriter(style).write(value, 0);
}

}  // namespace longhalo::jinja

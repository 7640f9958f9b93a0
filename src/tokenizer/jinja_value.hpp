// Values of the Jinja interpreter, with the meaning they have in Python: truth, equality, order, str() and
// repr().
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace longhalo::jinja {

/// A fault of the template, found while it is read or rendered. Becomes a UserError with file and line.
class TemplateError : public std::runtime_error {
 public:
  TemplateError(int line, const std::string& what) : std::runtime_error(what), line_(line) {}
  int line() const { return line_; }

 private:
  int line_;
};

/// A fault in a value; the evaluator adds the line and throws it again as TemplateError.
class ValueError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Value;
struct Statement;

struct Undefined {
  std::string name;  // of the variable or attribute that is not there
};
struct None {};
struct List {
  std::vector<Value> items;
  bool is_tuple = false;
  int depth = 1;  // of what is in it, set when it becomes a Value
};
struct Dict {
  std::vector<std::pair<Value, Value>> entries;  // in the order of insertion
  int depth = 1;                                 // as a List's
  const Value* find(const Value& key) const;
  void set(const Value& key, Value value);
};
/// The result of namespace(): the only thing whose attributes {% set %} changes.
struct Namespace {
  Dict attributes;
};
/// A global function, a method bound to its receiver, or a macro.
struct Callable {
  std::string name;
  std::shared_ptr<Value> receiver;
  const Statement* macro = nullptr;
};

/// While it lives, all text and values that are made or copied on this thread count against a budget;
/// ValueError when it is used up. A template of one line can double a text at every step.
class Budget {
 public:
  Budget();
  ~Budget();
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;
};

class Value {
 public:
  using Storage = std::variant<Undefined, None, bool, int64_t, double, std::string, std::shared_ptr<List>,
                               std::shared_ptr<Dict>, std::shared_ptr<Namespace>, Callable>;

  // A Value is made from whatever it holds without further ado, as in the language it stands for.
  // NOLINTBEGIN(google-explicit-constructor)
  Value() : storage_(Undefined{}) {}
  Value(Undefined undefined) : storage_(std::move(undefined)) {}
  Value(None none) : storage_(none) {}
  Value(bool truth) : storage_(truth) {}
  Value(int64_t number) : storage_(number) {}
  Value(double number) : storage_(number) {}
  Value(std::string text) : storage_(std::move(text)) { charge(); }
  Value(std::string_view text) : Value(std::string(text)) {}
  Value(const char* text) : Value(std::string(text)) {}
  Value(List list);
  Value(Dict dict);
  Value(Namespace space) : storage_(std::make_shared<Namespace>(std::move(space))) {}
  Value(Callable callable) : storage_(std::move(callable)) {}
  // NOLINTEND(google-explicit-constructor)
  Value(const Value& other) : storage_(other.storage_) { charge(); }
  Value& operator=(const Value& other) { return *this = Value(other); }
  Value(Value&&) noexcept = default;
  Value& operator=(Value&&) noexcept = default;
  ~Value() = default;

  /// 0 of a number or text, 1 of a list of those. Throws ValueError beyond the most that is allowed:
  /// equality, text and the end of a value go down by recursion. A namespace, whose attributes change, may be
  /// in nothing.
  int depth_inside() const;

  template <class T>
  bool is() const {
    return std::holds_alternative<T>(storage_);
  }
  bool is_list() const { return is<std::shared_ptr<List>>(); }
  bool is_dict() const { return is<std::shared_ptr<Dict>>(); }
  bool is_namespace() const { return is<std::shared_ptr<Namespace>>(); }
  /// int or bool, which Python counts as 0 and 1.
  bool is_whole() const { return is<int64_t>() || is<bool>(); }
  bool is_number() const { return is_whole() || is<double>(); }

  const std::string& string() const { return std::get<std::string>(storage_); }
  const List& list() const { return *std::get<std::shared_ptr<List>>(storage_); }
  const Dict& dict() const { return *std::get<std::shared_ptr<Dict>>(storage_); }
  Namespace& space() const { return *std::get<std::shared_ptr<Namespace>>(storage_); }
  const Callable& callable() const { return std::get<Callable>(storage_); }
  const Undefined& undefined() const { return std::get<Undefined>(storage_); }
  int64_t whole() const {
    return is<bool>() ? int64_t{std::get<bool>(storage_)} : std::get<int64_t>(storage_);
  }
  double real() const { return is<double>() ? std::get<double>(storage_) : static_cast<double>(whole()); }

  bool truth() const;
  /// str(): what {{ }} prints. Undefined is "".
  std::string str() const;
  std::string repr() const;
  /// "text", "list", "map", ... for messages.
  std::string_view kind() const;

 private:
  void charge() const;
  Storage storage_;
};

bool operator==(const Value& a, const Value& b);

/// Negative, zero or positive. Throws ValueError for values that Python does not order.
int compare(const Value& a, const Value& b);

/// len(); throws ValueError where there is none.
int64_t length(const Value& value);

/// What a loop over `value` visits: items, keys, characters; nothing for undefined. Throws ValueError
/// otherwise.
std::vector<Value> iterate(const Value& value);

/// Python's `item in container`.
bool contains(const Value& container, const Value& item);

struct JsonStyle {
  int64_t indent = -1;  // spaces a level; -1 is one line
  bool ascii_only = false;
  bool sort_keys = false;
  std::string item_separator;  // as given to Python's json.dumps; empty is its default
  std::string key_separator;
};
std::string to_json(const Value& value, const JsonStyle& style);

}  // namespace longhalo::jinja

// Attributes, methods, filters, tests and global functions of the Jinja interpreter: those that chat
// templates use, with the results that Jinja 3 gives. Any other is refused by name. All throw ValueError.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokenizer/jinja_value.hpp"

namespace longhalo::jinja {

/// The template called raise_exception(message): it refuses the conversation.
class RaisedException : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keywords;

  /// The argument at `index` or of that name, or nullptr.
  const Value* find(size_t index, std::string_view name) const;
  /// The first argument without a name; throws when there is none.
  const Value& first() const;
  Value get(size_t index, std::string_view name, Value otherwise) const;
  std::string get_text(size_t index, std::string_view name, std::string_view otherwise) const;
  int64_t get_whole(size_t index, std::string_view name, int64_t otherwise) const;
  /// Throws unless all are among `names`, in that order, and the first `needed` are there.
  void check(std::string_view function, std::initializer_list<std::string_view> names,
             size_t needed = 0) const;
};

/// `value.name`: a method, or an entry of a map or namespace, else undefined.
Value get_attribute(const Value& value, const std::string& name);

/// `value[index]`; what is not there is undefined.
Value get_item(const Value& value, const Value& index);

/// `value[start:stop:step]`; each bound may be none.
Value get_slice(const Value& value, const Value& start, const Value& stop, const Value& step);

Value call_method(const Value& receiver, const std::string& name, const Arguments& arguments);
Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments);
bool apply_test(const std::string& name, const Value& value, const Arguments& arguments);

/// Day on which a template that asks for the date is rendered.
struct Date {
  int year;
  int month;
  int day;
};

/// range, namespace, dict, raise_exception, strftime_now.
std::vector<std::string> global_functions();
Value call_global(const std::string& name, const Arguments& arguments, const Date& today);

/// upper(), lower(), capitalize() and title() of a text; what is beyond ASCII is refused, as its case needs
/// tables.
enum class Case { kUpper, kLower, kCapitalize, kTitleFilter, kTitleMethod };
std::string in_case(std::string_view text, Case wanted);

/// -value of a number.
Value negated(const Value& value);
/// Two operands and one of + - * / // % ** ~.
Value arithmetic(std::string_view operation, const Value& left, const Value& right);

/// Python's str.replace; `count` below 0 is all.
std::string replaced(std::string_view text, std::string_view old, std::string_view fresh, int64_t count);

/// Throws when a text of this many bytes would be absurd for a chat.
void check_text_size(size_t bytes);

}  // namespace longhalo::jinja

// Operators with Python's results: true division, floor division and modulo that round down, text and list
// joining.
#include <algorithm>
#include <cmath>

#include "core/text.hpp"
#include "tokenizer/jinja_builtins.hpp"

namespace longhalo::jinja {
namespace {

constexpr int64_t kLargestList = 1000000;

[[noreturn]] void overflow() {
  throw ValueError("a whole number grows beyond 64 bits");
}

[[noreturn]] void mismatch(std::string_view operation, const Value& left, const Value& right) {
  for (const Value* one : {&left, &right}) {
    if (one->is<Undefined>()) throw ValueError(text("'", one->undefined().name, "' is undefined"));
  }
  throw ValueError(text("a ", left.kind(), " ", operation, " a ", right.kind(), " is not possible"));
}

Value repeated(const Value& value, int64_t count) {
  count = std::max<int64_t>(count, 0);
  if (value.is<std::string>()) {
    const std::string& one = value.string();
    if (one.empty()) return one;
    check_text_size(static_cast<size_t>(std::min<int64_t>(count, int64_t{1} << 31)) * one.size());
    std::string all;
    for (int64_t i = 0; i < count; ++i)
      all += one;
    return all;
  }
  const std::vector<Value>& items = value.list().items;
  if (count * static_cast<int64_t>(std::min<size_t>(items.size(), 1)) > kLargestList ||
      count * static_cast<int64_t>(items.size()) > kLargestList) {
    throw ValueError(text("a list grows beyond ", kLargestList, " items"));
  }
  List all{{}, value.list().is_tuple};
  for (int64_t i = 0; i < count && !items.empty(); ++i)
    all.items.insert(all.items.end(), items.begin(), items.end());
  return all;
}

Value whole_power(int64_t base, int64_t exponent) {
  if (exponent < 0) return std::pow(static_cast<double>(base), static_cast<double>(exponent));
  if (base == 0 || base == 1) return exponent == 0 ? int64_t{1} : base;
  if (base == -1) return exponent % 2 == 0 ? int64_t{1} : int64_t{-1};
  int64_t result = 1;
  for (int64_t i = 0; i < exponent; ++i) {  // at most 63 rounds: the base is 2 or more
    if (__builtin_mul_overflow(result, base, &result)) overflow();
  }
  return result;
}

Value on_whole(std::string_view operation, int64_t a, int64_t b) {
  int64_t result = 0;
  if (operation == "+") {
    if (__builtin_add_overflow(a, b, &result)) overflow();
    return result;
  }
  if (operation == "-") {
    if (__builtin_sub_overflow(a, b, &result)) overflow();
    return result;
  }
  if (operation == "*") {
    if (__builtin_mul_overflow(a, b, &result)) overflow();
    return result;
  }
  if (operation == "**") return whole_power(a, b);
  if (b == 0) throw ValueError("division by zero");
  if (operation == "/") return static_cast<double>(a) / static_cast<double>(b);
  if (b == -1) return operation == "%" ? Value(int64_t{0}) : negated(a);
  const bool rounds_down = a % b != 0 && (a < 0) != (b < 0);
  return operation == "%" ? a % b + (rounds_down ? b : 0) : a / b - (rounds_down ? 1 : 0);
}

Value on_real(std::string_view operation, double a, double b) {
  if (operation == "+") return a + b;
  if (operation == "-") return a - b;
  if (operation == "*") return a * b;
  if (operation == "**") return std::pow(a, b);
  if (b == 0) throw ValueError("division by zero");
  if (operation == "/") return a / b;
  double remainder = std::fmod(a, b);
  if (remainder == 0) {
    remainder = std::copysign(0.0, b);
  } else if ((remainder < 0) != (b < 0)) {
    remainder += b;
  }
  return operation == "%" ? remainder : std::round((a - remainder) / b);
}

}  // namespace

Value negated(const Value& value) {
  if (value.is<double>()) return -value.real();
  if (!value.is_whole()) mismatch("-", value, value);
  int64_t result = 0;
  if (__builtin_sub_overflow(int64_t{0}, value.whole(), &result)) overflow();
  return result;
}

Value arithmetic(std::string_view operation, const Value& left, const Value& right) {
  const auto joined = [](std::string a, const std::string& b) {
    check_text_size(a.size() + b.size());
    return a += b;
  };
  if (operation == "~") return joined(left.str(), right.str());
  if (left.is_whole() && right.is_whole()) return on_whole(operation, left.whole(), right.whole());
  if (left.is_number() && right.is_number()) return on_real(operation, left.real(), right.real());
  if (operation == "+" && left.is<std::string>() && right.is<std::string>()) {
    return joined(left.string(), right.string());
  }
  if (operation == "+" && left.is_list() && right.is_list() &&
      left.list().is_tuple == right.list().is_tuple) {
    List all = left.list();
    all.items.insert(all.items.end(), right.list().items.begin(), right.list().items.end());
    if (static_cast<int64_t>(all.items.size()) > kLargestList) throw ValueError("a list grows too long");
    return all;
  }
  if (operation == "*") {
    const bool on_left = left.is<std::string>() || left.is_list();
    const bool on_right = right.is<std::string>() || right.is_list();
    if (on_left && right.is_whole()) return repeated(left, right.whole());
    if (on_right && left.is_whole()) return repeated(right, left.whole());
  }
  if (operation == "%" && left.is<std::string>())
    throw ValueError("formatting a text with % is not supported");
  mismatch(operation, left, right);
}

}  // namespace longhalo::jinja

// Attributes, items and slices, and the arguments of calls.
#include <algorithm>
#include <array>
#include <limits>

#include "core/text.hpp"
#include "tokenizer/jinja_builtins.hpp"
#include "tokenizer/jinja_text.hpp"

namespace longhalo::jinja {
namespace {

constexpr std::array<std::string_view, 22> kTextMethods = {
    "strip", "lstrip",  "rstrip",  "split",        "rsplit",       "splitlines", "startswith", "endswith",
    "upper", "lower",   "title",   "capitalize",   "replace",      "join",       "find",       "rfind",
    "count", "isdigit", "isspace", "removeprefix", "removesuffix", "index"};
constexpr std::array<std::string_view, 4> kDictMethods = {"items", "keys", "values", "get"};
constexpr std::array<std::string_view, 2> kListMethods = {"index", "count"};
// These exist in Python and change the map, or are of no use to a chat template.
constexpr std::array<std::string_view, 7> kRefusedDictMethods = {"pop",        "popitem", "update",  "clear",
                                                                 "setdefault", "copy",    "fromkeys"};

template <size_t N>
bool is_one_of(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Value bound(const Value& receiver, const std::string& name) {
  return Callable{name, std::make_shared<Value>(receiver), nullptr};
}

/// A bound of a slice as Python clips it; `otherwise` where it is not given.
int64_t clipped(const Value& bound, int64_t size, int64_t least, int64_t most, int64_t otherwise) {
  if (bound.is<None>()) return otherwise;
  if (!bound.is_whole()) throw ValueError(text("a slice takes whole numbers, not ", bound.kind()));
  int64_t index = bound.whole();
  if (index < 0) index = index < -size ? least : index + size;
  return std::clamp(index, least, most);
}

}  // namespace

const Value* Arguments::find(size_t index, std::string_view name) const {
  if (index < positional.size()) return &positional[index];
  for (const auto& [keyword, value] : keywords) {
    if (keyword == name) return &value;
  }
  return nullptr;
}

const Value& Arguments::first() const {
  if (positional.empty()) throw ValueError("an argument without a name is missing");
  return positional.front();
}

Value Arguments::get(size_t index, std::string_view name, Value otherwise) const {
  const Value* found = find(index, name);
  if (found == nullptr) return otherwise;
  return *found;
}

std::string Arguments::get_text(size_t index, std::string_view name, std::string_view otherwise) const {
  const Value* found = find(index, name);
  if (found == nullptr) return std::string(otherwise);
  if (!found->is<std::string>()) throw ValueError(text("'", name, "' takes a text, not ", found->kind()));
  return found->string();
}

int64_t Arguments::get_whole(size_t index, std::string_view name, int64_t otherwise) const {
  const Value* found = find(index, name);
  if (found == nullptr) return otherwise;
  if (!found->is_whole()) throw ValueError(text("'", name, "' takes a whole number, not ", found->kind()));
  return found->whole();
}

void Arguments::check(std::string_view function, std::initializer_list<std::string_view> names,
                      size_t needed) const {
  if (positional.size() > names.size()) {
    throw ValueError(
        text(function, " takes at most ", names.size(), " arguments here, not ", positional.size()));
  }
  for (const auto& [keyword, value] : keywords) {
    const auto found = std::find(names.begin(), names.end(), keyword);
    if (found == names.end()) throw ValueError(text(function, " has no argument '", keyword, "' here"));
    if (static_cast<size_t>(found - names.begin()) < positional.size()) {
      throw ValueError(text(function, " is given '", keyword, "' twice"));
    }
  }
  size_t index = 0;
  for (const std::string_view name : names) {
    if (index >= needed) break;
    if (find(index++, name) == nullptr) throw ValueError(text(function, " lacks its argument '", name, "'"));
  }
}

Value get_attribute(const Value& value, const std::string& name) {
  if (value.is<Undefined>()) throw ValueError(text("'", value.undefined().name, "' is undefined"));
  if (value.is<std::string>() && is_one_of(kTextMethods, name)) return bound(value, name);
  if (value.is_list() && is_one_of(kListMethods, name)) return bound(value, name);
  if (value.is_namespace()) {
    const Value* found = value.space().attributes.find(name);
    return found == nullptr ? Value(Undefined{name}) : *found;
  }
  if (value.is_dict()) {
    if (is_one_of(kDictMethods, name)) return bound(value, name);
    if (is_one_of(kRefusedDictMethods, name))
      throw ValueError(text("the method '", name, "' of a map is not supported"));
    if (const Value* found = value.dict().find(name)) return *found;
  }
  return Undefined{name};
}

Value get_item(const Value& value, const Value& index) {
  if (value.is<Undefined>()) throw ValueError(text("'", value.undefined().name, "' is undefined"));
  if (value.is_dict()) {
    if (const Value* found = value.dict().find(index)) return *found;
    if (!index.is<std::string>()) return Undefined{index.repr()};
  }
  if (index.is<std::string>()) return get_attribute(value, index.string());
  if (index.is_whole() && (value.is_list() || value.is<std::string>())) {
    const std::vector<Value> items = value.is_list() ? std::vector<Value>() : iterate(value);
    const std::vector<Value>& all = value.is_list() ? value.list().items : items;
    const auto size = static_cast<int64_t>(all.size());
    const int64_t position = index.whole() < 0 ? index.whole() + size : index.whole();
    if (position >= 0 && position < size) return all[static_cast<size_t>(position)];
  }
  return Undefined{index.repr()};
}

Value get_slice(const Value& value, const Value& start, const Value& stop, const Value& step) {
  if (value.is<Undefined>()) throw ValueError(text("'", value.undefined().name, "' is undefined"));
  if (!value.is_list() && !value.is<std::string>()) {
    throw ValueError(text("a ", value.kind(), " cannot be sliced"));
  }
  const std::vector<Value> all = iterate(value);
  const auto size = static_cast<int64_t>(all.size());
  const int64_t stride = step.is<None>() ? 1 : step.is_whole() ? step.whole() : 0;
  if (stride == 0) throw ValueError("a slice's step is a whole number other than 0");
  const bool forward = stride > 0;
  const int64_t least = forward ? 0 : -1, most = forward ? size : size - 1;
  int64_t at = clipped(start, size, least, most, forward ? least : most);
  const int64_t end = clipped(stop, size, least, most, forward ? most : least);
  std::vector<Value> taken;
  while (forward ? at < end : at > end) {
    taken.push_back(all[static_cast<size_t>(at)]);
    // A step beyond the size ends the walk, and must not overflow.
    at += std::clamp(stride, -size - 1, size + 1);
  }
  if (value.is_list()) return List{std::move(taken), value.list().is_tuple};
  std::string joined;
  for (const Value& one : taken)
    joined += one.string();
  return joined;
}

}  // namespace longhalo::jinja

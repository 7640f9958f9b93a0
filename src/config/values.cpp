#include "config/values.hpp"

#include <charconv>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "config/nearest.hpp"
#include "core/nearest.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

std::string kind_of(const YAML::Node& node) {
  if (node.IsNull()) return "has no value";
  if (node.IsSequence()) return "is a list";
  if (node.IsMap()) return "is a map";
  if (node.Scalar().empty()) return "is empty";
  return "is " + in_quotes(node.Scalar());
}

/// Quoted in YAML, hence text whatever it looks like.
bool is_quoted(const YAML::Node& node) {
  return node.Tag() == "!" || node.Tag() == "tag:yaml.org,2002:str";
}

enum class Parsed { kYes, kNo, kTooLarge };

template <class Number>
Parsed parse_number(std::string_view digits, Number& number) {
  if (digits.starts_with('+')) {
    digits.remove_prefix(1);
    if (digits.starts_with('-')) return Parsed::kNo;
  }
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, number);
  if (stop != end || error == std::errc::invalid_argument) return Parsed::kNo;
  return error == std::errc::result_out_of_range ? Parsed::kTooLarge : Parsed::kYes;
}

bool is_infinity(std::string_view scalar) {
  return scalar == "inf" || scalar == ".inf" || scalar == "+.inf" || scalar == ".Inf" || scalar == ".INF";
}

}  // namespace

std::string listed(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names)
    out += (out.empty() ? "" : ", ") + name;
  return out;
}

std::string WholeNumber::type() const {
  return text("whole number, ", least, " to ", most);
}

bool WholeNumber::read(const YAML::Node& node, const ValueContext& context, Value& value) const {
  const std::string wanted = text("; it takes a ", type());
  if (!node.IsScalar()) {
    context.fault(node, kind_of(node) + wanted);
    return false;
  }
  int64_t number = 0;
  const Parsed parsed = is_quoted(node) ? Parsed::kNo : parse_number(node.Scalar(), number);
  if (parsed == Parsed::kNo) {
    context.fault(node, kind_of(node) + ", not a whole number" + wanted);
    return false;
  }
  if (parsed == Parsed::kTooLarge || number < least || number > most) {
    context.fault(node, kind_of(node) + ", out of range" + wanted);
    return false;
  }
  value = number;
  return true;
}

std::string RealNumber::type() const {
  if (edge == Edge::kOpen) return text("number above ", least, ", at most ", most);
  return text("number, ", least, " to ", most);
}

bool RealNumber::read(const YAML::Node& node, const ValueContext& context, Value& value) const {
  const std::string wanted = text("; it takes a ", type());
  if (!node.IsScalar()) {
    context.fault(node, kind_of(node) + wanted);
    return false;
  }
  double number = 0;
  const Parsed parsed = is_quoted(node) ? Parsed::kNo : parse_number(node.Scalar(), number);
  if (parsed == Parsed::kNo || (parsed == Parsed::kYes && !std::isfinite(number))) {
    context.fault(node, kind_of(node) + ", not a number" + wanted);
    return false;
  }
  const bool inside = number <= most && (edge == Edge::kOpen ? number > least : number >= least);
  if (parsed == Parsed::kTooLarge || !inside) {
    context.fault(node, kind_of(node) + ", out of range" + wanted);
    return false;
  }
  value = number;
  return true;
}

bool AutoOrNumber::read(const YAML::Node& node, const ValueContext& context, Value& value) const {
  if (node.IsScalar() && node.Scalar() == "auto") {
    value.reset();
    return true;
  }
  double read_value = 0;
  if (!number.read(node, context, read_value)) return false;
  value = read_value;
  return true;
}

bool Switch::read(const YAML::Node& node, const ValueContext& context, Value& value) const {
  const bool on = node.IsScalar() && !is_quoted(node) && node.Scalar() == "true";
  const bool off = node.IsScalar() && !is_quoted(node) && node.Scalar() == "false";
  if (!on && !off) {
    context.fault(node, kind_of(node) + "; it takes " + type());
    return false;
  }
  value = on;
  return true;
}

bool TextValue::read(const YAML::Node& node, const ValueContext& context, Value& value) const {
  if (!node.IsScalar()) {
    std::string_view advice = "; it takes a text";
    if (node.IsNull()) advice = "; it takes a text (an empty one is \"\")";
    if (node.IsMap()) advice = "; it takes a text (put quotes around one that holds ': ')";
    context.fault(node, kind_of(node) + std::string(advice));
    return false;
  }
  // Written "\0": the system's calls would take what stands before it for the whole path.
  if (node.Scalar().find('\0') != std::string::npos) {
    context.fault(node, "is a text that holds a NUL byte; it takes one without");
    return false;
  }
  value = node.Scalar();
  return true;
}

bool TextList::read(const YAML::Node& node, const ValueContext& context, Value& value) const {
  Value read_values;
  bool good = true;
  const auto read_one = [&](const YAML::Node& element) {
    std::string one;
    good = TextValue{}.read(element, context, one) && good;
    read_values.push_back(std::move(one));
  };
  if (node.IsSequence()) {
    for (const YAML::Node& element : node)
      read_one(element);
  } else if (node.IsScalar() && node.Scalar().empty()) {
    context.fault(node, kind_of(node) + "; it takes a " + type() + ", and [] for none");
    return false;
  } else {
    read_one(node);
  }
  if (good) value = std::move(read_values);
  return good;
}

bool BandList::read(const YAML::Node& node, const ValueContext& context, Value& value) const {
  constexpr int64_t kMost = int64_t{1} << 40;
  if (!node.IsSequence()) {
    context.fault(node, kind_of(node) + "; it takes a " + type());
    return false;
  }
  Value read_values;
  bool good = true;
  for (const YAML::Node& element : node) {
    if (!element.IsSequence() || element.size() != 3) {
      const std::string found = element.IsSequence() ? text("has a band of ", element.size(), " numbers")
                                                     : text("has a band that ", kind_of(element));
      context.fault(element, found + "; a band is [stride, near, far]");
      good = false;
      continue;
    }
    BandConfig band;
    good = WholeNumber{1, kMost}.read(element[0], context, band.stride) && good;
    good = WholeNumber{0, kMost}.read(element[1], context, band.near) && good;
    if (element[2].IsScalar() && is_infinity(element[2].Scalar())) {
      band.far = kFarUnlimited;
    } else {
      good = WholeNumber{1, kMost}.read(element[2], context, band.far) && good;
    }
    read_values.push_back(band);
  }
  if (good) value = std::move(read_values);
  return good;
}

Json BandList::write(const Value& value) const {
  Json out = Json::array();
  for (const BandConfig& band : value) {
    out.push_back({band.stride, band.near, band.far == kFarUnlimited ? Json("inf") : Json(band.far)});
  }
  return out;
}

bool read_choice(const YAML::Node& node, const ValueContext& context, const std::vector<std::string>& names,
                 size_t& index) {
  if (!node.IsScalar()) {
    context.fault(node, kind_of(node) + "; it takes one of " + listed(names));
    return false;
  }
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == node.Scalar()) {
      index = i;
      return true;
    }
  }
  const auto hint = nearest_word(node.Scalar(), names);
  context.fault(node, kind_of(node) + (hint ? "; did you mean " + in_quotes(*hint) + "? It" : "; it") +
                          " takes one of " + listed(names));
  return false;
}

}  // namespace longhalo

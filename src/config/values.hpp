// Codecs: how a value of each kind is read from YAML, checked, described and written back.
//
// Each has a Value, read() (which reports every fault of the value and says whether there was none), write()
// and type() (the words of configs/reference.yaml).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "config/config.hpp"
#include "config/faults.hpp"

namespace longhalo {

using Json = nlohmann::ordered_json;

/// A whole number in [least, most].
struct WholeNumber {
  using Value = int64_t;
  int64_t least;
  int64_t most;
  bool read(const YAML::Node& node, const ValueContext& context, Value& value) const;
  Json write(Value value) const { return value; }
  std::string type() const;
};

/// A finite number in [least, most], or in (least, most] with Edge::kOpen.
struct RealNumber {
  enum class Edge { kClosed, kOpen };
  using Value = double;
  double least;
  double most;
  Edge edge = Edge::kClosed;
  bool read(const YAML::Node& node, const ValueContext& context, Value& value) const;
  Json write(Value value) const { return value; }
  std::string type() const;
};

/// "auto" (an empty optional) or a number.
struct AutoOrNumber {
  using Value = std::optional<double>;
  RealNumber number;
  bool read(const YAML::Node& node, const ValueContext& context, Value& value) const;
  Json write(const Value& value) const { return value ? Json(*value) : Json("auto"); }
  std::string type() const { return "auto or " + number.type(); }
};

/// true or false.
struct Switch {
  using Value = bool;
  bool read(const YAML::Node& node, const ValueContext& context, Value& value) const;
  Json write(Value value) const { return value; }
  std::string type() const { return "true or false"; }
};

struct TextValue {
  using Value = std::string;
  bool read(const YAML::Node& node, const ValueContext& context, Value& value) const;
  Json write(const Value& value) const { return value; }
  std::string type() const { return "text"; }
};

/// A list of texts; a single text stands for a list of one.
struct TextList {
  using Value = std::vector<std::string>;
  bool read(const YAML::Node& node, const ValueContext& context, Value& value) const;
  Json write(const Value& value) const { return value; }
  std::string type() const { return "list of texts, or one text"; }
};

/// A list of [stride, near, far].
struct BandList {
  using Value = std::vector<BandConfig>;
  bool read(const YAML::Node& node, const ValueContext& context, Value& value) const;
  Json write(const Value& value) const;
  std::string type() const { return "list of at most 4 of [stride, near, far], far a number or inf"; }
};

/// The index of one of `names`.
bool read_choice(const YAML::Node& node, const ValueContext& context, const std::vector<std::string>& names,
                 size_t& index);
std::string listed(const std::vector<std::string>& names);

/// One of the enumerators of E, which are 0, 1, ... in the order of `names`.
template <class E>
struct Choice {
  using Value = E;
  std::vector<std::string> names;
  bool read(const YAML::Node& node, const ValueContext& context, Value& value) const {
    size_t index = 0;
    if (!read_choice(node, context, names, index)) return false;
    value = static_cast<E>(index);
    return true;
  }
  Json write(Value value) const { return names[static_cast<size_t>(value)]; }
  std::string type() const { return "one of " + listed(names); }
};

/// A list of different enumerators; a single name stands for a list of one.
template <class E>
struct ChoiceList {
  using Value = std::vector<E>;
  std::vector<std::string> names;
  bool read(const YAML::Node& node, const ValueContext& context, Value& value) const {
    Value read_values;
    const auto read_one = [&](const YAML::Node& element) {
      size_t index = 0;
      if (!read_choice(element, context, names, index)) return false;
      for (const E known : read_values) {
        if (known == static_cast<E>(index)) {
          context.fault(element, "names " + in_quotes(names[index]) + " twice");
          return false;
        }
      }
      read_values.push_back(static_cast<E>(index));
      return true;
    };
    bool good = true;
    if (node.IsSequence()) {
      for (const YAML::Node& element : node)
        good = read_one(element) && good;
    } else {
      good = read_one(node);
    }
    if (good) value = std::move(read_values);
    return good;
  }
  Json write(const Value& value) const {
    Json out = Json::array();
    for (const E one : value)
      out.push_back(names[static_cast<size_t>(one)]);
    return out;
  }
  std::string type() const { return "list of any of " + listed(names); }
};

}  // namespace longhalo

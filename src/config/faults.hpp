// Collects every fault of every config source, so that all are reported in one go, and knows how each kind of
// source names a place and spells a key: a file by line and column, a variable and --set by their own text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <yaml-cpp/yaml.h>

namespace longhalo {

struct ValueSource {
  enum class Kind { kFile, kEnvironment, kOverride };
  Kind kind = Kind::kFile;
  std::string name;  // the path, the variable's name, or "--set a.b=..."

  /// "demo.yaml:3:5", "environment variable LONGHALO_...", "--set ...".
  std::string place(const YAML::Mark& mark) const;
  /// How a user of this source writes `key`: "attention.window" or "LONGHALO_ATTENTION__WINDOW".
  std::string spell(std::string_view key) const;
};

class ConfigFaults {
 public:
  void add(std::string_view place, std::string_view what);
  bool empty() const { return lines_.empty(); }
  /// Throws one UserError with every fault, in the order of add(), unless there is none.
  void raise(std::string_view where) const;

 private:
  std::vector<std::string> lines_;
};

/// What a codec needs to report a fault of the value of `key`.
struct ValueContext {
  const ValueSource& source;
  ConfigFaults& faults;
  std::string key;
  YAML::Mark key_mark;

  /// "<place>: <key> <what>". `node` may be an element inside the key's value.
  void fault(const YAML::Node& node, std::string_view what) const;
};

/// Text of the user made fit for a one-line message: quoted, control characters escaped, at most 60 bytes.
std::string in_quotes(std::string_view value);

}  // namespace longhalo

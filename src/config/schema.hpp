// The one table of every config key: path, meaning, type, and how its value is read and written.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.hpp"
#include "config/faults.hpp"
#include "config/values.hpp"

namespace longhalo {

struct ConfigKey {
  std::string path;  // "model.shape.layers"
  std::string doc;   // one sentence or two, for configs/reference.yaml
  std::string type;
  /// Reports every fault of the value; true when there is none and the Config has been changed.
  std::function<bool(const YAML::Node&, const ValueContext&, Config&)> read;
  std::function<Json(const Config&)> write;
};

struct ConfigSection {
  std::string path;
  std::string doc;
};

/// Keys of one section stand together; sections and keys are in the order of configs/reference.yaml.
struct ConfigSchema {
  std::vector<ConfigSection> sections;
  std::vector<ConfigKey> keys;

  const ConfigKey* find_key(std::string_view path) const;
  const ConfigSection* find_section(std::string_view path) const;  // "" is the whole config
  std::vector<std::string> key_paths() const;
  std::vector<std::string> all_paths() const;  // of sections and keys
  std::vector<std::string> names_in(std::string_view section) const;
};

const ConfigSchema& schema();

}  // namespace longhalo

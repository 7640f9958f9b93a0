#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <utility>

#include "config/checks.hpp"
#include "config/config.hpp"
#include "config/nearest.hpp"
#include "config/schema.hpp"
#include "config/yaml_text.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr std::string_view kVariablePrefix = "LONGHALO_";

/// Applies sources, one after the other, to one Config.
class Loader {
 public:
  explicit Loader(std::string config_name) { origins_.config_name = std::move(config_name); }

  void apply_text(std::string_view yaml, const ValueSource& source) {
    const auto root = parse_yaml(yaml, source, faults_);
    unread_ = unread_ || !root;
    if (root) apply(*root, "", source, root->Mark());
  }

  void apply_file(const std::filesystem::path& path, const std::function<bool()>& asked_to_stop) {
    const auto yaml = read_config_file(path, faults_, asked_to_stop);
    unread_ = unread_ || !yaml;
    if (yaml) apply_text(*yaml, {ValueSource::Kind::kFile, path.string()});
  }

  void apply_variable(const std::string& name, const std::string& value) {
    std::string key;
    const std::string_view rest = std::string_view(name).substr(kVariablePrefix.size());
    for (size_t i = 0; i < rest.size(); ++i) {
      if (rest.substr(i, 2) == "__") {
        key += '.';
        ++i;
      } else {
        key += static_cast<char>(std::tolower(static_cast<unsigned char>(rest[i])));
      }
    }
    const ValueSource source{ValueSource::Kind::kEnvironment, name};
    if (key.find('.') == std::string::npos && schema().find_key(key) == nullptr) {
      // Without "__" it is no setting, but it may have been meant as one: LONGHALO_RUN_DEVICE. The others,
      // such as LONGHALO_ROOT, belong to someone else.
      if (nearest_spelling(key, schema().key_paths()))
        faults_.add(source.place({}),
                    unknown(key, source) + " If it is someone else's, unset it for this job");
      return;
    }
    apply_value(key, value, source);
  }

  void apply_override(const std::string& assignment) {
    const ValueSource source{ValueSource::Kind::kOverride, "--set " + shortened(assignment)};
    const size_t equals = assignment.find('=');
    if (equals == std::string::npos || equals == 0) {
      faults_.add(source.name, "is not of the form section.key=value");
      return;
    }
    apply_value(assignment.substr(0, equals), assignment.substr(equals + 1), source);
  }

  /// `config_file` is empty where there is none.
  Config finish(Subcommand subcommand, LookAtPlaces look, const std::filesystem::path& config_file) {
    // What an unreadable source would have set is not missing.
    if (!unread_) check_config(subcommand, config_, origins_, faults_);
    if (!unread_ && look == LookAtPlaces::kYes)
      check_places(subcommand, config_, config_file, origins_, faults_);
    faults_.raise(origins_.config_name);
    return std::move(config_);
  }

 private:
  static std::string shortened(const std::string& assignment) {
    const std::string shown = in_quotes(assignment);
    return shown.substr(1, shown.size() - 2);
  }

  void apply_value(const std::string& key, const std::string& value, const ValueSource& source) {
    // An empty value is the empty text rather than YAML's null.
    const auto node = value.empty() ? YAML::Node(std::string()) : parse_yaml(value, source, faults_);
    unread_ = unread_ || !node;
    if (node) apply(*node, key, source, {});
  }

  void apply(const YAML::Node& node, const std::string& path, const ValueSource& source,
             const YAML::Mark& key_mark) {
    const std::string place = source.place(key_mark);
    if (const ConfigKey* key = schema().find_key(path)) {
      const bool good = key->read(node, {source, faults_, path, key_mark}, config_);
      origins_.place[path] = place;
      if (good) {
        origins_.faulty.erase(path);
      } else {
        origins_.faulty.insert(path);
      }
      return;
    }
    if (schema().find_section(path) == nullptr) {
      faults_.add(place, unknown(path, source));
      return;
    }
    if (node.IsNull()) return;
    if (!node.IsMap()) {
      faults_.add(place, text(path.empty() ? std::string("the config") : source.spell(path),
                              " is a section, not a value; its keys are ", listed(schema().names_in(path))));
      return;
    }
    apply_section(node, path, source);
  }

  void apply_section(const YAML::Node& map, const std::string& path, const ValueSource& source) {
    std::map<std::string, int> seen;  // name, line
    for (const auto& entry : map) {
      const YAML::Node& name = entry.first;
      const YAML::Mark mark = name.Mark();
      if (!name.IsScalar()) {
        faults_.add(source.place(mark), "a key is not text");
        continue;
      }
      if (name.Scalar() == "<<") {
        faults_.add(source.place(mark), "YAML merge keys (<<) are not supported; write the keys out");
        continue;
      }
      const std::string key = path.empty() ? name.Scalar() : path + "." + name.Scalar();
      const auto [first, is_new] = seen.emplace(name.Scalar(), mark.line + 1);
      if (!is_new) {
        faults_.add(source.place(mark), text(in_quotes(key), " is given twice, first on line ", first->second,
                                             "; remove one of the two"));
        continue;
      }
      apply(entry.second, key, source, mark);
    }
  }

  static std::string unknown(const std::string& path, const ValueSource& source) {
    const bool is_variable = source.kind == ValueSource::Kind::kEnvironment;
    const std::string said =
        is_variable ? std::string("names no config key") : "unknown key " + in_quotes(path);
    auto hint = is_variable ? nearest_spelling(path, schema().key_paths()) : std::nullopt;
    if (!hint) hint = nearest_key(path, schema().all_paths());
    if (hint) {
      return text(said, "; did you mean ", source.spell(*hint), "?");
    }
    // Nothing is near: say what the section that does exist has to offer.
    std::string section = path;
    do {
      const size_t dot = section.rfind('.');
      section = dot == std::string::npos ? std::string() : section.substr(0, dot);
    } while (schema().find_section(section) == nullptr);
    return text(said, "; ", section.empty() ? std::string("the config") : section, " has ",
                listed(schema().names_in(section)));
  }

  Config config_;
  KeyOrigins origins_;
  ConfigFaults faults_;
  bool unread_ = false;  // a source could not be read as YAML
};

}  // namespace

std::vector<std::pair<std::string, std::string>> config_environment() {
  std::vector<std::pair<std::string, std::string>> found;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view whole(*variable);
    const size_t equals = whole.find('=');
    if (!whole.starts_with(kVariablePrefix) || equals == std::string_view::npos) continue;
    found.emplace_back(whole.substr(0, equals), whole.substr(equals + 1));
  }
  std::sort(found.begin(), found.end());
  return found;
}

Config load_config(Subcommand subcommand, const ConfigSources& sources) {
  Loader loader(sources.file ? sources.file->string() : std::string("the command line (no --config file)"));
  if (sources.file) loader.apply_file(*sources.file, sources.asked_to_stop);
  for (const auto& [name, value] : sources.environment) {
    if (name.starts_with(kVariablePrefix)) loader.apply_variable(name, value);
  }
  for (const std::string& assignment : sources.overrides)
    loader.apply_override(assignment);
  return loader.finish(subcommand, sources.look_at_places, sources.file.value_or(""));
}

Config load_config_text(Subcommand subcommand, std::string_view yaml, std::string_view name) {
  Loader loader{std::string(name)};
  loader.apply_text(yaml, {ValueSource::Kind::kFile, std::string(name)});
  return loader.finish(subcommand, LookAtPlaces::kNo, {});
}

std::string prometheus_path(const Config& config) {
  if (!config.telemetry.prometheus.empty()) return config.telemetry.prometheus;
  if (config.output.directory.empty()) return {};
  return (std::filesystem::path(config.output.directory) / "metrics.prom").string();
}

std::string log_path(const Config& config) {
  if (!config.run.log.empty() || config.output.directory.empty()) return config.run.log;
  return (std::filesystem::path(config.output.directory) / "log.jsonl").string();
}

}  // namespace longhalo

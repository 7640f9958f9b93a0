// Writes a Config back: as YAML, as JSON for the log, and as the documented reference.
#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>

#include "config/config.hpp"
#include "config/schema.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

enum class Comments { kNone, kAll };

constexpr size_t kCommentColumns = 110;

/// Plain where every YAML version reads it as text, else in JSON's quotes, which are YAML's too.
std::string yaml_text(const std::string& value) {
  static const std::vector<std::string> kWordsOfYaml = {"null", "true", "false", "yes", "no",
                                                        "on",   "off",  "y",     "n"};
  const auto is_plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '/' || c == '.' || c == '-';
  };
  std::string lower = value;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  const bool plain = !value.empty() &&
                     (std::isalpha(static_cast<unsigned char>(value[0])) != 0 || value[0] == '/') &&
                     std::all_of(value.begin(), value.end(), is_plain) &&
                     std::find(kWordsOfYaml.begin(), kWordsOfYaml.end(), lower) == kWordsOfYaml.end();
  return plain ? value : Json(value).dump();
}

std::string yaml_value(const Json& value) {
  if (value.is_string()) return yaml_text(value.get<std::string>());
  if (!value.is_array()) return value.dump();
  std::string out;
  for (const Json& element : value)
    out += text(out.empty() ? "" : ", ", yaml_value(element));
  return text("[", out, "]");
}

std::string comment(std::string_view words, const std::string& indent) {
  std::string out, line;
  const auto flush = [&] {
    out += text(indent, "#", line, "\n");
    line.clear();
  };
  size_t begin = 0;
  while (begin < words.size()) {
    const size_t end = std::min(words.find(' ', begin), words.size());
    const std::string_view word = words.substr(begin, end - begin);
    if (indent.size() + line.size() + word.size() + 2 > kCommentColumns) flush();
    line += " ";
    line += word;
    begin = end + 1;
  }
  flush();
  return out;
}

std::string dump(const Config& config, Comments comments) {
  std::string out;
  std::string section;
  const auto indent_of = [](std::string_view path) {
    return std::string(2 * static_cast<size_t>(std::count(path.begin(), path.end(), '.')), ' ');
  };
  for (const ConfigKey& key : schema().keys) {
    const size_t dot = key.path.rfind('.');
    const std::string key_section = dot == std::string::npos ? std::string() : key.path.substr(0, dot);
    if (key_section != section || key_section.empty()) {
      const std::string indent = indent_of(key_section);
      if (comments == Comments::kAll && !out.empty()) out += "\n";
      if (!key_section.empty()) {
        if (comments == Comments::kAll) out += comment(schema().find_section(key_section)->doc, indent);
        out += text(indent, key_section.substr(key_section.rfind('.') + 1), ":\n");
      }
      section = key_section;
    }
    const std::string indent = indent_of(key.path);
    const Json value = key.write(config);
    if (comments == Comments::kAll) out += comment(key.doc + " (" + key.type + ")", indent);
    out += text(indent, key.path.substr(dot + 1), ":");
    const bool as_list = value.is_array() && !value.empty();
    if (!as_list) {
      out += text(" ", yaml_value(value), "\n");
      continue;
    }
    out += "\n";
    for (const Json& element : value)
      out += text(indent, "  - ", yaml_value(element), "\n");
  }
  return out;
}

}  // namespace

std::string dump_yaml(const Config& config) {
  return dump(config, Comments::kNone);
}

std::string dump_json(const Config& config) {
  Json root = Json::object();
  for (const ConfigKey& key : schema().keys) {
    Json* place = &root;
    size_t begin = 0;
    for (size_t dot = key.path.find('.'); dot != std::string::npos; dot = key.path.find('.', begin)) {
      place = &(*place)[key.path.substr(begin, dot - begin)];
      begin = dot + 1;
    }
    (*place)[key.path.substr(begin)] = key.write(config);
  }
  return root.dump();
}

std::string reference_yaml() {
  std::string out =
      "# Every key of a LongHalo config with its meaning, type and default. Written from the schema in\n"
      "# src/config/schema.cpp (cmake --build build/release --target config_reference); do not edit by "
      "hand.\n"
      "#\n"
      "# A key is set, in order of precedence, by --set section.key=value, by the environment variable\n"
      "# LONGHALO_SECTION__KEY, or by the file given with --config. Values of all three are YAML. Relative "
      "paths are\n"
      "# relative to the current directory.\n\n";
  return out + dump(Config{}, Comments::kAll);
}

}  // namespace longhalo

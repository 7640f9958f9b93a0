#include "config/yaml_text.hpp"

#include <algorithm>
#include <sstream>
#include <system_error>

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr int64_t kLargestBytes = 1 << 20;

/// Offset of the first byte that is not well-formed UTF-8 (Unicode 15, table 3-7), or npos.
size_t first_bad_utf8(std::string_view bytes) {
  const auto at = [&](size_t i) { return i < bytes.size() ? static_cast<unsigned char>(bytes[i]) : 0; };
  size_t i = 0;
  while (i < bytes.size()) {
    const int lead = at(i);
    int length = 1;
    int low = 0x80, high = 0xBF;  // of the second byte
    if (lead >= 0xC2 && lead <= 0xDF) {
      length = 2;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      length = 3;
      if (lead == 0xE0) low = 0xA0;
      if (lead == 0xED) high = 0x9F;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      length = 4;
      if (lead == 0xF0) low = 0x90;
      if (lead == 0xF4) high = 0x8F;
    } else if (lead >= 0x80) {
      return i;
    }
    for (int k = 1; k < length; ++k) {
      const int byte = at(i + static_cast<size_t>(k));
      if (byte < low || byte > high) return i;
      low = 0x80;
      high = 0xBF;
    }
    i += static_cast<size_t>(length);
  }
  return std::string_view::npos;
}

YAML::Mark mark_at(std::string_view text, size_t offset) {
  YAML::Mark mark;
  const std::string_view before = text.substr(0, offset);
  mark.line = static_cast<int>(std::count(before.begin(), before.end(), '\n'));
  const size_t line_start = before.rfind('\n');
  mark.column = static_cast<int>(line_start == std::string_view::npos ? offset : offset - line_start - 1);
  return mark;
}

/// Remembers where the last document began.
class DocumentStarts : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark& mark) override { last = mark; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
  }
  void OnMapEnd() override {}

  YAML::Mark last;
};

/// Where a second document begins. yaml-cpp takes a stray "," for the beginning of one document after another
/// without ever moving on: LoadAll() then fills the memory, and Load() drops the rest of the text without a
/// word.
std::optional<YAML::Mark> second_document(std::string_view yaml) {
  std::istringstream stream{std::string(yaml)};
  YAML::Parser parser(stream);
  DocumentStarts starts;
  if (!parser.HandleNextDocument(starts) || !parser.HandleNextDocument(starts)) return std::nullopt;
  return starts.last;
}

// What the shell opens for --config <(...) has such a name, and mpirun and srun do not hand it on to ranks.
std::string word_on_pipe(const std::filesystem::path& path) {
  const std::string name = path.string();
  if (!name.starts_with("/dev/fd/") && !name.starts_with("/proc/self/fd/")) return {};
  return "; ranks do not inherit what the shell opened for mpirun or srun, such as <(...): write a file, or "
         "pipe it into the launcher and give --config /dev/stdin, which rank 0 reads";
}

}  // namespace

std::optional<std::string> read_config_file(const std::filesystem::path& path, ConfigFaults& faults,
                                            const std::function<bool()>& asked_to_stop) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) {
    faults.add(path.string(), "there is no such config file" + start_of_relative(path) + word_on_pipe(path));
    return std::nullopt;
  }
  if (error || status.type() == std::filesystem::file_type::directory) {
    faults.add(path.string(), error ? "the config file cannot be read: " + error.message()
                                    : std::string("is a directory, not a config file"));
    return std::nullopt;
  }
  if (status.type() == std::filesystem::file_type::socket) {
    faults.add(path.string(), "is a socket, which cannot be read as a file; give a file or a pipe");
    return std::nullopt;
  }
  try {
    std::string content = read_stream(path, kLargestBytes + 1, asked_to_stop);
    if (static_cast<int64_t>(content.size()) <= kLargestBytes) return content;
    faults.add(path.string(), text("is larger than ", kLargestBytes,
                                   " bytes, too large for a config; is it the "
                                   "right file?"));
  } catch (const UserError& error) {
    const std::string words = error.what();
    faults.add(path.string(), words.substr(0, words.find('\n')));
  }
  return std::nullopt;
}

std::optional<YAML::Node> parse_yaml(std::string_view yaml, const ValueSource& source, ConfigFaults& faults) {
  if (const size_t nul = yaml.find('\0'); nul != std::string_view::npos) {
    faults.add(source.place(mark_at(yaml, nul)), "holds a NUL byte; a config is plain UTF-8 text");
    return std::nullopt;
  }
  if (const size_t bad = first_bad_utf8(yaml); bad != std::string_view::npos) {
    faults.add(source.place(mark_at(yaml, bad)), "holds bytes that are not UTF-8; save the config as UTF-8");
    return std::nullopt;
  }
  try {
    if (const auto second = second_document(yaml)) {
      faults.add(source.place(*second),
                 "here begins what belongs to no key (a stray ',' or bracket?) or, after '---', a second "
                 "document; a "
                 "config is one");
      return std::nullopt;
    }
    return YAML::Load(std::string(yaml));
  } catch (const YAML::Exception& error) {
    faults.add(source.place(error.mark), "is not YAML: " + error.msg);
    return std::nullopt;
  }
}

}  // namespace longhalo

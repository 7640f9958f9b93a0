#include "telemetry/prometheus.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "core/log.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

std::string number_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  char digits[40];
  std::snprintf(digits, sizeof digits, "%.12g", value);
  return digits;
}

// In labels also the quote is escaped.
std::string escaped(const std::string& words, bool label) {
  std::string out;
  for (const char c : words) {
    if (c == '\n') {
      out += "\\n";
      continue;
    }
    if (c == '\\' || (label && c == '"')) out += '\\';
    out += c;
  }
  return out;
}

std::string labels_text(const PrometheusText::Labels& common, const PrometheusText::Labels& own) {
  std::string out;
  for (const PrometheusText::Labels* labels : {&common, &own})
    for (const auto& [name, value] : *labels)
      out += (out.empty() ? "{" : ",") + name + "=\"" + escaped(value, true) + '"';
  return out.empty() ? out : out + "}";
}

// Why what stands at `file` must not be replaced; empty: it may. A rename would put a file in place of a
// device, of a link such as /dev/stdout, or of somebody's text that was named by mistake.
std::string objection_to_replacing(const std::string& file) {
  struct stat status {};
  if (::lstat(file.c_str(), &status) != 0) return "";
  if (S_ISLNK(status.st_mode)) return "it is a link";
  if (!S_ISREG(status.st_mode)) return "it is no file";
  std::string beginning(ReplacedFile::kBeginning.size(), '\0');
  std::ifstream(file, std::ios::binary)
      .read(beginning.data(), static_cast<std::streamsize>(beginning.size()));
  return beginning == ReplacedFile::kBeginning ? "" : "it is there already, and no such figures are in it";
}

bool write_whole(const std::string& file, const std::string& contents) {
  ::unlink(file.c_str());  // of a job that was killed; O_EXCL goes through no link that somebody put here
  const int descriptor = ::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) return false;
  size_t done = 0;
  while (done < contents.size()) {
    const ssize_t put = ::write(descriptor, contents.data() + done, contents.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) break;
    done += static_cast<size_t>(put);
  }
  const int error = errno;
  const bool closed = ::close(descriptor) == 0;
  if (done == contents.size() && closed) return true;
  if (done < contents.size()) errno = error;
  return false;
}

}  // namespace

void PrometheusText::add(const std::string& name, const char* type, const std::string& help,
                         const Labels& labels, double value) {
  auto family =
      std::find_if(families_.begin(), families_.end(), [&](const Family& one) { return one.name == name; });
  if (family == families_.end()) family = families_.insert(family, {name, type, help, {}});
  family->samples += name + labels_text(common_, labels) + ' ' + number_text(value) + '\n';
}

std::string PrometheusText::text() const {
  std::string out;
  for (const Family& family : families_)
    out += "# HELP " + family.name + ' ' + escaped(family.help, false) + "\n# TYPE " + family.name + ' ' +
           family.type + '\n' + family.samples;
  return out;
}

void ReplacedFile::replace(const std::string& contents) {
  if (file_.empty()) return;
  const std::string temporary = file_ + ".longhalo-tmp";
  if (const std::string objection = objection_to_replacing(file_); !objection.empty()) {
    if (!std::exchange(warned_, true))
      log_warning(text(file_, " is not replaced: ", objection,
                       "; it gets no figures. Name a new file (telemetry.prometheus)"));
    return;
  }
  if (write_whole(temporary, contents) && std::rename(temporary.c_str(), file_.c_str()) == 0) return;
  const int error = errno;
  ::unlink(temporary.c_str());
  if (std::exchange(warned_, true)) return;
  log_warning(text(file_, " cannot be replaced (", std::strerror(error), "); it gets no new figures"));
}

}  // namespace longhalo

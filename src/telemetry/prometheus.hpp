// The newest figures of a job as a file that Prometheus' node_exporter (textfile collector) or any script may
// read at any moment: it is replaced as a whole, so that nobody ever sees half of it.
//
//   PrometheusText figures;
//   figures.gauge("longhalo_phase_seconds", "Seconds by phase.", {{"phase", "forward"}}, 1.5);
//   file.replace(figures.text());
//
// Format: prometheus.io, "Text-based format", version 0.0.4.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace longhalo {

class PrometheusText {
 public:
  using Labels = std::vector<std::pair<std::string, std::string>>;

  /// Put on every sample, before its own labels.
  explicit PrometheusText(Labels common = {}) : common_(std::move(common)) {}

  /// A value that may rise and fall; a sum over the job's life (its name ends in _total). Samples of one name
  /// stand together under the first one's `help`, whatever the order of the calls.
  void gauge(const std::string& name, const std::string& help, const Labels& labels, double value) {
    add(name, "gauge", help, labels, value);
  }
  void counter(const std::string& name, const std::string& help, const Labels& labels, double value) {
    add(name, "counter", help, labels, value);
  }
  std::string text() const;

 private:
  struct Family {
    std::string name, type, help, samples;
  };
  void add(const std::string& name, const char* type, const std::string& help, const Labels& labels,
           double value);

  Labels common_;
  std::vector<Family> families_;
};

/// A file of figures that is replaced again and again. Whatever else stands in its place stays there. A fault
/// (full disk, folder gone) is a warning once and then nothing: the job goes on.
class ReplacedFile {
 public:
  /// Of the figures of every job; what begins otherwise is not replaced.
  static constexpr std::string_view kBeginning = "# HELP longhalo_";

  /// An empty name: nothing is ever written. What stands at <file>.longhalo-tmp is this job's to remove.
  explicit ReplacedFile(std::string file = {}) : file_(std::move(file)) {}
  /// Writes <file>.longhalo-tmp, never through a link that lies there, and renames it. Not forced to the
  /// disk: the next replacement is near.
  void replace(const std::string& contents);

 private:
  std::string file_;
  bool warned_ = false;
};

}  // namespace longhalo

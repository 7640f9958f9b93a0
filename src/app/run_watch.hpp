// What is watched while a job runs: the error counts of each host's network ports, ranks that are slower than
// the others, and the Prometheus file that holds the newest figures. Training looks at every record,
// inference at every document.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "app/rank_figures.hpp"
#include "comm/mpi_session.hpp"
#include "config/config.hpp"
#include "core/clock.hpp"
#include "telemetry/link_counters.hpp"
#include "telemetry/prometheus.hpp"
#include "telemetry/run_log.hpp"
#include "telemetry/stragglers.hpp"

namespace longhalo {

class RunWatch {
 public:
  /// Counts of errors from here on are this job's. Collective.
  RunWatch(const MpiSession& session, const Config& config, const std::string& command);

  const std::vector<std::string>& hosts() const { return hosts_; }

  /// The figures of all ranks, as RankFigures. Beside them each rank tells how long it computed itself, and
  /// how much work that was (StragglerWatch), and the first rank of a host which error counts have grown. On
  /// rank 0 both come to a warning and a record of `log` ("link_errors", "straggler"). Collective.
  RankFigures take(nlohmann::json own, double own_seconds, double work, RunLog& log);

  /// With what is known of links and stragglers in it, for the caller to add to.
  PrometheusText figures() const;
  /// Rank 0 replaces the file.
  void publish(const PrometheusText& figures);
  /// Rank 0: the job ends by itself, done or stopped on request; from then on old figures are no sign of a
  /// job that hangs or died.
  void end();

 private:
  nlohmann::json own_link_errors();
  void warn_of_links(const RankFigures& figures, RunLog& log);
  void name_stragglers(const RankFigures& figures, RunLog& log);
  PrometheusText labelled() const;
  void replace_file();

  const MpiSession& session_;
  std::vector<std::string> hosts_;
  std::string command_;
  std::optional<LinkWatch> links_;  // on the first rank of a host
  Stopwatch since_links_;
  double next_links_seconds_ = 0;
  StragglerWatch stragglers_;
  struct Port {
    std::string host, device, port, counter;
    auto operator<=>(const Port&) const = default;
  };
  std::map<Port, int64_t> link_errors_;  // of this job
  ReplacedFile file_;
  std::string published_;
  bool is_running_ = true;
};

/// {"name": {"min", "mean", "max"}} as gauges with the labels `label` and stat.
void add_spreads(PrometheusText& figures, const std::string& name, const std::string& help,
                 const std::string& label, const nlohmann::json& spreads);

}  // namespace longhalo

#include "app/run_watch.hpp"

#include <algorithm>
#include <ctime>

#include "app/training_setup.hpp"
#include "core/log.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

using nlohmann::json;

// A look at the counters takes at most so much of a job's time: with some drivers each count is a question to
// the card.
constexpr double kMostShareOfTime = 0.01;

json as_json(const LinkErrors& errors) {
  return {{"device", errors.device},
          {"port", errors.port},
          {"counter", errors.counter},
          {"added", errors.added},
          {"count", errors.count}};
}

}  // namespace

RunWatch::RunWatch(const MpiSession& session, const Config& config, const std::string& command)
    : session_(session),
      hosts_(session.hosts()),
      command_(command),
      stragglers_(config.telemetry.straggler_ratio),
      file_(session.is_root() ? prometheus_path(config) : std::string()) {
  if (session.local_rank() == 0 && !config.telemetry.link_counters.empty())
    links_.emplace(config.telemetry.link_counters);
}

RankFigures RunWatch::take(json own, double own_seconds, double work, RunLog& log) {
  own["watch"] = {{"own_seconds", own_seconds}, {"work", work}};
  own["links"] = own_link_errors();
  RankFigures figures(session_, hosts_, own);
  if (session_.is_root()) {
    warn_of_links(figures, log);
    name_stragglers(figures, log);
  }
  return figures;
}

json RunWatch::own_link_errors() {
  json list = json::array();
  if (!links_ || since_links_.seconds() < next_links_seconds_) return list;
  const Stopwatch watch;
  for (const LinkErrors& errors : links_->grown())
    list.push_back(as_json(errors));
  next_links_seconds_ = watch.seconds() / kMostShareOfTime;
  since_links_.restart();
  return list;
}

void RunWatch::warn_of_links(const RankFigures& figures, RunLog& log) {
  for (size_t rank = 0; rank < figures.all().size(); ++rank)
    for (const json& told : figures.all()[rank].at("links")) {
      const LinkErrors errors{told.at("device"), told.at("port"), told.at("counter"), told.at("added"),
                              told.at("count")};
      const std::string& host = hosts_[rank];
      link_errors_[{host, errors.device, errors.port, errors.counter}] += errors.added;
      log_warning(text("a network link of host ", host, " has errors: ", errors.describe(),
                       "; look at its cable and its switch port if that goes on"));
      json record = told;
      record["host"] = host;
      log.write("link_errors", record);
    }
}

void RunWatch::name_stragglers(const RankFigures& figures, RunLog& log) {
  const std::vector<double> seconds = figures.values("watch", "own_seconds");
  for (const StragglerChange& change : stragglers_.take(seconds, figures.values("watch", "work"))) {
    const std::string& host = hosts_[static_cast<size_t>(change.rank)];
    if (change.is_slow)
      log_warning(text("rank ", change.rank, " on host ", host, " is slow: its own compute takes ",
                       change.ratio,
                       " times as long as the median rank's, and all wait for it; see what "
                       "else runs there, and the clocks of its GPU"));
    else
      log_info(text("rank ", change.rank, " on host ", host, " is as fast as the others again"));
    log.write("straggler",
              {{"rank", change.rank}, {"host", host}, {"slow", change.is_slow}, {"ratio", change.ratio}});
  }
}

PrometheusText RunWatch::labelled() const {
  return PrometheusText(PrometheusText::Labels{{"command", command_}, {"job", job_name()}});
}

PrometheusText RunWatch::figures() const {
  PrometheusText figures = labelled();
  figures.gauge("longhalo_ranks", "Ranks of the job.", {}, session_.ranks());
  const std::vector<int> slow = stragglers_.slow();
  figures.gauge("longhalo_stragglers", "Ranks that are slower than the others.", {},
                static_cast<double>(slow.size()));
  for (const int rank : slow)
    figures.gauge("longhalo_straggler", "A rank that is slower than the others.",
                  {{"rank", text(rank)}, {"host", hosts_[static_cast<size_t>(rank)]}}, 1);
  for (const auto& [port, count] : link_errors_)
    figures.counter(
        "longhalo_link_errors_total", "Errors that a network port has counted since the job began.",
        {{"host", port.host}, {"device", port.device}, {"port", port.port}, {"counter", port.counter}},
        static_cast<double>(count));
  return figures;
}

void RunWatch::publish(const PrometheusText& figures) {
  published_ = figures.text();
  replace_file();
}

void RunWatch::end() {
  is_running_ = false;
  replace_file();
}

void RunWatch::replace_file() {
  PrometheusText now = labelled();
  now.gauge("longhalo_running", "1 until the job has ended by itself, done or stopped on request: then 0.",
            {}, is_running_ ? 1 : 0);
  now.gauge("longhalo_record_timestamp_seconds", "When these figures were written, Unix time.", {},
            static_cast<double>(std::time(nullptr)));
  file_.replace(now.text() + published_);
}

void add_spreads(PrometheusText& figures, const std::string& name, const std::string& help,
                 const std::string& label, const json& spreads) {
  for (const auto& [key, spread] : spreads.items())
    for (const char* stat : {"min", "mean", "max"})
      figures.gauge(name, help, {{label, key}, {"stat", stat}}, spread.at(stat).get<double>());
}

}  // namespace longhalo

#include "doctor/doctor_ports.hpp"

#include <algorithm>
#include <set>

#include "core/text.hpp"

namespace longhalo {
namespace {

// Errors of the wire. The others among a port's errors are messages sent again, which congestion makes, too:
// they mean little unless they grow now.
constexpr const char* kWireCounters[] = {"symbol_error",
                                         "link_downed",
                                         "link_error_recovery",
                                         "port_rcv_errors",
                                         "local_link_integrity_errors",
                                         "excessive_buffer_overrun_errors"};

bool is_wire(const std::string& counter) {
  return std::find(std::begin(kWireCounters), std::end(kWireCounters), counter) != std::end(kWireCounters);
}

int64_t growth_of(const std::string& counter, int64_t value, const LinkPort* before) {
  if (before == nullptr) return 0;
  const auto earlier = before->counters.find(counter);
  return earlier == before->counters.end() ? 0 : value - earlier->second;
}

Finding counters_row(const LinkPort* before, const LinkPort& after) {
  std::string grown, again, old;
  nlohmann::json values = nlohmann::json::object();
  const auto append = [](std::string& list, const auto&... words) {
    list += text(list.empty() ? "" : ", ", words...);
  };
  for (const auto& [name, value] : after.counters) {
    if (!is_link_error(name)) continue;
    values[name] = value;
    const int64_t growth = growth_of(name, value, before);
    if (growth > 0)
      append(is_wire(name) ? grown : again, name, " +", growth);
    else if (value > 0 && is_wire(name))
      append(old, name, ' ', value);
  }
  const auto row = [&](std::string found, Verdict verdict, const char* remedy) {
    return Finding{"link errors", Scope::kHost, after.name(), std::move(found),
                   "none",        verdict,      remedy,       values};
  };
  if (!grown.empty())
    return row(text("while this ran: ", grown, again.empty() ? "" : ", ", again), Verdict::kFail,
               "leave this host out (sbatch --exclude), and have the cable and adapter of this port checked");
  if (!again.empty())
    return row(text("messages sent again while this ran: ", again), Verdict::kWarn,
               "a damaged or crowded link: compare with other hosts, and have flow control checked");
  if (!old.empty())
    return row(text("of earlier times: ", old), Verdict::kWarn,
               "tell the cluster's administrators; perfquery -R sets the counters back");
  return row("none", Verdict::kPass, "");
}

}  // namespace

Finding no_sysfs_finding(const std::filesystem::path& sysfs) {
  return {"InfiniBand",
          Scope::kHost,
          "",
          text("cannot be looked at: there is no folder ", sysfs.string()),
          "the kernel's own, /sys",
          Verdict::kWarn,
          "mount /sys where the ranks run (in a container, too), or set doctor.sysfs to where it is",
          {}};
}

std::vector<Finding> port_findings(const std::vector<LinkPort>& before, const std::vector<LinkPort>& after) {
  if (after.empty()) return {{"InfiniBand", Scope::kHost, "", "no adapter", "", Verdict::kSkipped, "", {}}};
  std::vector<Finding> rows;
  std::set<std::string> rates;
  for (const LinkPort& port : after) {
    const bool good = port.is_active();
    rows.push_back({"InfiniBand",
                    Scope::kHost,
                    port.name(),
                    good ? text("active, ", port.rate, ", ", port.link_layer) : text("down: ", port.state),
                    "active",
                    good ? Verdict::kPass : Verdict::kWarn,
                    good
                        ? ""
                        : "if jobs use this port, have its cable and switch checked; if not, leave it out of "
                          "NCCL_IB_HCA",
                    {}});
    if (!good) continue;
    rates.insert(port.rate);
    const auto earlier = std::find_if(before.begin(), before.end(),
                                      [&](const LinkPort& one) { return one.name() == port.name(); });
    rows.push_back(counters_row(earlier == before.end() ? nullptr : &*earlier, port));
  }
  if (rates.size() > 1) {
    std::string found;
    for (const std::string& rate : rates)
      found += text(found.empty() ? "ports of different rates: " : ", ", rate);
    rows.push_back({"InfiniBand",
                    Scope::kHost,
                    "",
                    found,
                    "one rate",
                    Verdict::kWarn,
                    "name the fast ones in NCCL_IB_HCA; a cable may have come up slower than it can",
                    {}});
  }
  return rows;
}

}  // namespace longhalo

// What the ports of a host's InfiniBand and RoCE adapters (telemetry/link_counters.hpp reads them) mean for a
// job: are they up, at one rate, and without errors? A damaged link sends again what was lost, so that
// nothing but time and its counters tell of it. Pure.
#pragma once

#include <filesystem>
#include <vector>

#include "doctor/doctor_report.hpp"
#include "telemetry/link_counters.hpp"

namespace longhalo {

/// Where the kernel shows its devices nowhere: that there are no adapters cannot be told from that.
Finding no_sysfs_finding(const std::filesystem::path& sysfs);

/// `before` and `after` the messages of this run: counters that grew between them are faults of now, those
/// above zero may be old.
std::vector<Finding> port_findings(const std::vector<LinkPort>& before, const std::vector<LinkPort>& after);

}  // namespace longhalo

// What the state of a host's GPUs means for a job: pure judgement over what doctor_nvml.hpp reads.
#pragma once

#include <string>
#include <vector>

#include "doctor/doctor_nvml.hpp"
#include "doctor/doctor_report.hpp"

namespace longhalo {

/// Memory, ECC, clocks, temperature, power, persistence and PCIe width of one GPU; what it does not say is
/// left out.
std::vector<Finding> gpu_findings(const GpuState& gpu);

/// NVLinks that are up, and how the GPUs of a host reach each other.
std::vector<Finding> topology_findings(const std::vector<GpuState>& gpus, const std::vector<GpuPair>& pairs);

/// Both, of the GPUs of `uuids` (all that NVML shows where that is empty) as `library` tells; where it cannot
/// be loaded a warning if `gpus_are_used`, and one row that it was skipped if not.
std::vector<Finding> examine_gpus(const std::string& library, const std::vector<std::string>& uuids,
                                  bool gpus_are_used);

}  // namespace longhalo

#include "doctor/doctor_gpus.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>

#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr double kLeastFreeShare = 0.9;     // a context of CUDA takes less than 1% of a large card
constexpr int64_t kHotCelsius = 80;         // where the card does not say when it slows down
constexpr int64_t kHeatReserveCelsius = 5;  // below the temperature at which it slows down
constexpr int64_t kGiB = int64_t{1} << 30;

std::string place_of(const GpuState& gpu) {
  return text("GPU ", gpu.index);
}

Finding row(const GpuState& gpu, const char* check, std::string found, std::string wanted, Verdict verdict,
            std::string remedy = "", nlohmann::json values = {}) {
  return {check,   Scope::kHost,      place_of(gpu),    std::move(found), std::move(wanted),
          verdict, std::move(remedy), std::move(values)};
}

Finding memory_row(const GpuState& gpu) {
  const double share =
      static_cast<double>(*gpu.free_bytes) / static_cast<double>(std::max<int64_t>(1, *gpu.total_bytes));
  const bool good = share >= kLeastFreeShare;
  return row(gpu, "GPU memory",
             text(gpu.name, ", ", *gpu.total_bytes / kGiB, " GiB, ",
                  good ? "at least 90" : text(std::floor(share * 100)), "% free"),
             "at least 90% free", good ? Verdict::kPass : Verdict::kWarn,
             good ? "" : "another process holds it: nvidia-smi lists them",
             {{"total_bytes", *gpu.total_bytes}, {"free_bytes", *gpu.free_bytes}, {"uuid", gpu.uuid}});
}

Finding ecc_row(const GpuState& gpu) {
  const nlohmann::json values = {{"corrected", gpu.corrected_errors.value_or(0)},
                                 {"uncorrected", gpu.uncorrected_errors.value_or(0)},
                                 {"uncorrected_ever", gpu.uncorrected_errors_ever.value_or(0)}};
  const char* wanted = "on, no uncorrected error";
  const auto bad = [&](std::string found, Verdict verdict, const char* remedy) {
    return row(gpu, "GPU ECC", std::move(found), wanted, verdict, remedy, values);
  };
  if (gpu.remap_failed.value_or(false))
    return bad("a damaged row of memory could not be replaced", Verdict::kFail,
               "drain this host: the GPU is defective");
  if (gpu.uncorrected_errors.value_or(0) > 0)
    return bad(text(*gpu.uncorrected_errors, " uncorrected errors since the driver was loaded"),
               Verdict::kFail,
               "drain this host: results may be wrong; reset the GPU (nvidia-smi -r), and have it replaced "
               "if they come back");
  if (gpu.remap_pending.value_or(false))
    return bad("a damaged row of memory waits to be replaced", Verdict::kFail,
               "drain this host and reset the GPU (nvidia-smi -r)");
  if (!*gpu.ecc) return bad("off", Verdict::kWarn, "nvidia-smi -e 1 and a reset turn it on");
  if (gpu.uncorrected_errors_ever.value_or(0) > 0)
    return bad(text("on; ", *gpu.uncorrected_errors_ever, " uncorrected errors in earlier times"),
               Verdict::kWarn,
               "tell the cluster's administrators; nvidia-smi -q -d ECC,ROW_REMAPPER says more");
  return row(gpu, "GPU ECC", "on, no uncorrected error", wanted, Verdict::kPass, "", values);
}

Finding clocks_row(const GpuState& gpu) {
  struct Reason {
    uint64_t bit;
    Verdict verdict;
    const char* words;
    const char* remedy;
  };
  static constexpr Reason kReasons[] = {
      {kSlowByHardwareHeat, Verdict::kFail, "slowed down by heat",
       "drain this host: its cooling is at fault"},
      {kSlowByPowerBrake, Verdict::kFail, "slowed down by the host's power supply",
       "drain this host: its power supply is at fault"},
      {kSlowByHardware, Verdict::kFail, "slowed down by the hardware",
       "drain this host; nvidia-smi -q -d PERFORMANCE says more"},
      {kSlowBySoftwareHeat, Verdict::kWarn, "lowered to stay cool", "check the host's cooling"},
      {kSlowBySetting, Verdict::kWarn, "lowered by a setting", "nvidia-smi -rac and -rgc take it back"},
      {kSlowByPowerCap, Verdict::kWarn, "lowered by the power limit",
       "let other jobs of this GPU end, or raise the limit (nvidia-smi -pl)"}};
  std::string found, remedy;
  auto worst = Verdict::kPass;
  for (const Reason& reason : kReasons) {
    if ((*gpu.slow_reasons & reason.bit) == 0) continue;
    found += text(found.empty() ? "" : ", ", reason.words);
    if (remedy.empty()) remedy = reason.remedy;
    worst = std::max(worst, reason.verdict);
  }
  return row(gpu, "GPU clocks", worst == Verdict::kPass ? "not lowered" : found, "not lowered", worst, remedy,
             {{"reasons", *gpu.slow_reasons}});
}

Finding temperature_row(const GpuState& gpu) {
  const int64_t hot = gpu.slowdown_celsius ? *gpu.slowdown_celsius - kHeatReserveCelsius : kHotCelsius;
  const bool good = *gpu.celsius < hot;
  const std::string wanted = text("below ", hot, " C");
  return row(gpu, "GPU temperature", good ? wanted : text(*gpu.celsius, " C"), wanted,
             good ? Verdict::kPass : Verdict::kWarn,
             good ? "" : "check the host's cooling, or what else runs there", {{"celsius", *gpu.celsius}});
}

Finding power_row(const GpuState& gpu) {
  const bool good = *gpu.power_limit_watts >= *gpu.default_power_limit_watts;
  const std::string wanted = text("at least ", *gpu.default_power_limit_watts, " W");
  return row(
      gpu, "GPU power limit", text(*gpu.power_limit_watts, " W"), wanted,
      good ? Verdict::kPass : Verdict::kWarn,
      good ? "" : text("nvidia-smi -pl ", *gpu.default_power_limit_watts, " sets the card's own limit"));
}

Finding pcie_row(const GpuState& gpu) {
  const bool good = *gpu.pcie_width >= *gpu.most_pcie_width;
  // The generation falls while the card is idle; the width does not.
  return row(
      gpu, "GPU PCIe",
      text("x", *gpu.pcie_width,
           gpu.most_pcie_generation ? text(", generation ", *gpu.most_pcie_generation, " at most") : ""),
      text("x", *gpu.most_pcie_width), good ? Verdict::kPass : Verdict::kWarn,
      good ? "" : "the card is badly seated or its slot is narrow: tell the cluster's administrators",
      {{"generation", gpu.pcie_generation.value_or(0)}});
}

const char* path_words(int64_t ancestor) {
  return ancestor <= 10   ? "one PCIe switch"
         : ancestor <= 20 ? "PCIe switches"
         : ancestor <= 30 ? "a PCIe host bridge"
         : ancestor <= 40 ? "the socket's fabric"
                          : "both sockets";
}

}  // namespace

std::vector<Finding> gpu_findings(const GpuState& gpu) {
  std::vector<Finding> rows;
  if (gpu.total_bytes && gpu.free_bytes) rows.push_back(memory_row(gpu));
  if (gpu.ecc) rows.push_back(ecc_row(gpu));
  if (gpu.slow_reasons) rows.push_back(clocks_row(gpu));
  if (gpu.celsius) rows.push_back(temperature_row(gpu));
  if (gpu.power_limit_watts && gpu.default_power_limit_watts) rows.push_back(power_row(gpu));
  if (gpu.persistence)
    rows.push_back(
        row(gpu, "GPU persistence", *gpu.persistence ? "on" : "off", "on",
            *gpu.persistence ? Verdict::kPass : Verdict::kWarn,
            *gpu.persistence ? "" : "nvidia-smi -pm 1: without it the driver is set up anew at each start"));
  if (gpu.pcie_width && gpu.most_pcie_width) rows.push_back(pcie_row(gpu));
  return rows;
}

std::vector<Finding> topology_findings(const std::vector<GpuState>& gpus, const std::vector<GpuPair>& pairs) {
  std::vector<Finding> rows;
  for (const GpuState& gpu : gpus) {
    if (gpu.nvlinks == 0) continue;
    const bool good = gpu.active_nvlinks == gpu.nvlinks;
    rows.push_back(row(
        gpu, "NVLink", text(gpu.active_nvlinks, " of ", gpu.nvlinks, " links are up"), "all links up",
        good ? Verdict::kPass : Verdict::kWarn,
        good ? "" : "nvidia-smi nvlink --status says which; on NVSwitch systems check the fabric manager"));
  }
  std::map<std::string, std::vector<std::string>> by_path;  // pairs of GPUs by how they meet
  std::set<std::string> without_peers;
  for (const GpuPair& pair : pairs) {
    const std::string names = text(pair.first, "-", pair.second);
    if (pair.nvlink.value_or(false))
      by_path["NVLink"].push_back(names);
    else if (pair.ancestor)
      by_path[path_words(*pair.ancestor)].push_back(names);
    if (pair.peer_memory && !*pair.peer_memory) without_peers.insert(names);
  }
  for (const auto& [path, names] : by_path) {
    std::string found = text("by ", path, ": ", names.size() == pairs.size() ? "all pairs" : "");
    if (names.size() != pairs.size())
      for (size_t i = 0; i < names.size(); ++i)
        found += text(i == 0 ? "" : ", ", names[i]);
    rows.push_back({"GPU topology",
                    Scope::kHost,
                    "",
                    found,
                    "",
                    Verdict::kPass,
                    "",
                    {{"path", path}, {"pairs", names}}});
  }
  if (!without_peers.empty()) {
    std::string found = "no access to each other's memory:";
    for (const std::string& names : without_peers)
      found += text(' ', names);
    rows.push_back({"GPU topology",
                    Scope::kHost,
                    "",
                    found,
                    "peer-to-peer access between all GPUs of a host",
                    Verdict::kWarn,
                    "turn off PCIe access control (ACS) and the IOMMU in the host's firmware; nvidia-smi "
                    "topo -p2p r says more",
                    {}});
  }
  return rows;
}

std::vector<Finding> examine_gpus(const std::string& library, const std::vector<std::string>& uuids,
                                  bool gpus_are_used) {
  std::vector<Finding> rows;
  std::unique_ptr<Nvml> nvml;
  try {
    nvml = std::make_unique<Nvml>(library);
  } catch (const std::exception& error) {
    Finding missing = failed_check("GPU state", Scope::kHost, error);
    missing.wanted = "what NVML says of the GPUs";
    missing.verdict = gpus_are_used ? Verdict::kWarn : Verdict::kSkipped;
    return {missing};
  }
  try {
    const std::vector<GpuState> gpus = nvml->gpus(uuids);
    if (gpus.empty())
      return {{"GPU state", Scope::kHost, "", "NVML shows no GPU", "", Verdict::kSkipped, "", {}}};
    for (const GpuState& gpu : gpus)
      for (Finding& finding : gpu_findings(gpu))
        rows.push_back(std::move(finding));
    for (Finding& finding : topology_findings(gpus, nvml->pairs(gpus)))
      rows.push_back(std::move(finding));
    std::set<std::string> names;
    for (const GpuState& gpu : gpus)
      names.insert(gpu.name);
    if (names.size() > 1)
      rows.push_back({"GPU model",
                      Scope::kHost,
                      "",
                      text(names.size(), " kinds, among them ", *names.begin()),
                      "one kind",
                      Verdict::kWarn,
                      "the slowest sets the pace; CUDA_VISIBLE_DEVICES can leave some out",
                      {}});
  } catch (const std::exception& error) {
    rows.push_back(failed_check("GPU state", Scope::kHost, error));
  }
  return rows;
}

}  // namespace longhalo

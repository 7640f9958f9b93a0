#include "doctor/doctor_device.hpp"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "app/device_setup.hpp"
#include "core/text.hpp"
#include "device/available_memory.hpp"

namespace longhalo {
namespace {

constexpr double kSlowShare = 0.9;  // of the median; cards of one kind differ by a few percent

std::string tflops(double flops) {
  std::ostringstream out;
  out << std::setprecision(3) << flops / 1e12 << " TFLOP/s";
  return out.str();
}

std::optional<PairWay> connect_hosts(const MpiSession& session, const Config& config,
                                     std::vector<Finding>& findings) {
  std::optional<PairWay> way;
  // One rank has nobody to send to.
  const int64_t bytes = session.ranks() > 1 ? config.doctor.halo_bytes : 0;
  session.together([&] {
    // What is sent, what comes, and what should come.
    require_host_memory(3 * bytes, session.local_ranks(), text("doctor.halo_bytes ", bytes));
  });
  session.together([&] {  // once all have asked what there is
    way = host_pair_way(session, bytes);
  });
  if (session.is_root())
    findings.push_back({"transport",
                        Scope::kJob,
                        "",
                        text(way->transport, ": halos of CPU ranks"),
                        "",
                        Verdict::kPass,
                        "",
                        {}});
  return way;
}

}  // namespace

DoctorDevice open_doctor_device(const MpiSession& session, const Config& config) {
  DoctorDevice device;
  try {
    const RunDevice kind = run_device(session, config);
    session.together([&] { run_precision(config, kind); });  // which that device may not have
#ifdef LONGHALO_HAVE_CUDA
    if (kind == RunDevice::kCuda) open_doctor_gpu(session, config, device);
#endif
    if (kind == RunDevice::kCpu)
      device.findings.push_back({"device", Scope::kRank, "", "the CPU", "", Verdict::kPass, "", {}});
  } catch (const JointError& error) {  // known on every rank
    device = {};
    if (session.is_root()) device.findings.push_back(failed_check("device", Scope::kJob, error));
  }
  if (!device.connect)
    device.connect = [&session, &config](std::vector<Finding>& findings) {
      return connect_hosts(session, config, findings);
    };
  return device;
}

std::vector<Finding> rate_findings(const std::vector<double>& flops, const std::vector<std::string>& hosts) {
  std::vector<double> sorted;
  for (const double one : flops)
    if (one > 0) sorted.push_back(one);
  if (sorted.empty()) return {};
  std::sort(sorted.begin(), sorted.end());
  const double median = sorted[sorted.size() / 2];
  const std::string wanted = text("at least 90% of the median, ", tflops(median));
  std::vector<Finding> rows;
  for (size_t rank = 0; rank < flops.size(); ++rank) {
    if (flops[rank] <= 0 || flops[rank] >= kSlowShare * median) continue;
    rows.push_back({"matrix products",
                    Scope::kJob,
                    text("rank ", rank, " on ", hosts[rank]),
                    tflops(flops[rank]),
                    wanted,
                    Verdict::kWarn,
                    "every layer waits for the slowest GPU: look at its clocks and temperature, or "
                    "leave its host out (sbatch --exclude)",
                    {}});
  }
  if (rows.empty())
    rows.push_back({"matrix products",
                    Scope::kJob,
                    "",
                    text(tflops(sorted.front()), " to ", tflops(sorted.back()), " a GPU, in bf16"),
                    wanted,
                    Verdict::kPass,
                    "",
                    {{"flops", flops}}});
  return rows;
}

}  // namespace longhalo

#include "doctor/doctor.hpp"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <optional>
#include <set>
#include <sstream>

#include "app/model_setup.hpp"
#include "app/training_setup.hpp"
#include "bench/bench.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "doctor/doctor_cores.hpp"
#include "doctor/doctor_device.hpp"
#include "doctor/doctor_disks.hpp"
#include "doctor/doctor_gpus.hpp"
#include "doctor/doctor_inputs.hpp"
#include "doctor/doctor_launch.hpp"
#include "doctor/doctor_links.hpp"
#include "doctor/doctor_patience.hpp"
#include "doctor/doctor_ports.hpp"
#include "doctor/doctor_rdma.hpp"
#include "doctor/doctor_report.hpp"
#include "storage/report_file.hpp"
#include "telemetry/run_log.hpp"

namespace longhalo {
namespace {

// /dev/shm for a rank: what Open MPI takes there for its segment, and beside GPUs a few of NCCL's
// connections.
constexpr int64_t kShmBytesOfCpuRank = int64_t{8} << 20;
constexpr int64_t kShmBytesOfGpuRank = int64_t{64} << 20;

void append(std::vector<Finding>& all, std::vector<Finding> more) {
  std::move(more.begin(), more.end(), std::back_inserter(all));
}

class Doctor {
 public:
  Doctor(const MpiSession& session, const Config& config)
      : session_(session),
        config_(config),
        options_(config.doctor),
        patience_(session, options_.patience_seconds) {
    hosts_ = session.hosts();
    several_hosts_ = std::set<std::string>(hosts_.begin(), hosts_.end()).size() > 1;
    first_on_host_ =
        std::find(hosts_.begin(), hosts_.end(), session.host()) == hosts_.begin() + session.rank();
  }

  ExitCode run() {
    session_.together([&] {
      if (session_.is_root()) require_report_place(options_.json);
    });
    check_launch();
    check_inputs();
    DoctorDevice device = open_device();
    check_host(device);
    check_rates(device);
    check_links(device);
    check_disks();
    return report();
  }

 private:
  void check_launch() {
    patience_.begin("launch");
    if (session_.is_root()) add(launch_finding(session_.ranks(), process_environment()));
  }

  void check_inputs() {
    patience_.begin("model and input");
    if (first_on_host_)
      append(findings_, examine_inputs(config_, session_.is_root() ? Reader::kRoot : Reader::kOtherHost));
  }

  DoctorDevice open_device() {
    patience_.begin("device");
    DoctorDevice device = open_doctor_device(session_, config_);
    patience_.begin("versions");
    std::vector<Fact> facts = version_facts();
    facts.insert(facts.end(), device.facts.begin(), device.facts.end());
    facts.push_back(config_fact(config_));
    for (Fact& fact : environment_facts(process_environment()))
      facts.push_back(std::move(fact));
    append(findings_, alike_findings(session_, facts));
    append(findings_, std::move(device.findings));
    return device;
  }

  void check_host(const DoctorDevice& device) {
    patience_.begin("host");
    if (Finding cores =
            cores_of_host(session_, hosts_, wanted_threads(session_, config_), unusable_omp_threads(config_));
        first_on_host_)
      add(std::move(cores));
    if (first_on_host_) {
      append(findings_, examine_gpus(options_.nvml, device.host_gpus, device.is_gpu));
      add(rdma_finding(read_rdma(options_.sysfs, device.dma_buf), device.is_gpu, several_hosts_));
      const auto ranks = std::count(hosts_.begin(), hosts_.end(), session_.host());
      const int64_t a_rank = options_.shm_bytes > 0 ? options_.shm_bytes
                             : device.is_gpu        ? kShmBytesOfGpuRank
                                                    : kShmBytesOfCpuRank;
      add(shared_memory_finding("/dev/shm", a_rank * ranks));
    }
    add(mpi_cuda_finding(device.is_gpu));
  }

  void check_rates(const DoctorDevice& device) {
    if (!device.matrix_flops) return;
    patience_.begin("matrix products");
    double own = 0;
    try {
      own = device.matrix_flops();
    } catch (const std::exception& error) {
      add(failed_check("matrix products", Scope::kRank, error));
    }
    std::vector<double> all(hosts_.size());
    const Waiting waiting("the rates of all ranks");
    check_mpi(MPI_Allgather(&own, 1, MPI_DOUBLE, all.data(), 1, MPI_DOUBLE, session_.comm()),
              "MPI_Allgather");
    if (session_.is_root()) append(findings_, rate_findings(all, hosts_));
  }

  void measure_halos(const DoctorDevice& device) {
    const std::optional<PairWay> way = device.connect(findings_);
    patience_.begin("halo bandwidth");
    if (way) {
      transport_ = way->transport;
      pairs_ = measure_pairs(session_, *way, options_.halo_bytes,
                             [&](const std::string& what) { patience_.begin(what); });
    }
    if (session_.is_root() && (way || session_.ranks() == 1))
      append(findings_, pair_findings(pairs_, hosts_, transport_, options_.halo_bytes,
                                      options_.least_halo_gb_per_second));
  }

  void check_links(const DoctorDevice& device) {
    patience_.begin("transport");
    const std::vector<LinkPort> before = read_link_ports(link_folder());
    try {
      measure_halos(device);
    } catch (const JointError& error) {  // known on every rank: no memory for messages
      if (session_.is_root()) add(failed_check("halo bandwidth", Scope::kJob, error));
    }
    if (!first_on_host_) return;
    std::error_code ignored;
    if (std::filesystem::is_directory(options_.sysfs, ignored))
      append(findings_, port_findings(before, read_link_ports(link_folder())));
    else
      add(no_sysfs_finding(options_.sysfs));
  }

  void check_disks() {
    patience_.begin("scratch");
    if (first_on_host_)
      add(examine_disk({"scratch", activations_directory(config_), options_.disk_bytes,
                        options_.least_scratch_gb_per_second, "doctor.least_scratch_gb_per_second"}));
    patience_.begin("output folder");
    if (config_.output.directory.empty()) {
      if (session_.is_root())
        add({"output folder", Scope::kJob, "", "output.directory is not set", "", Verdict::kSkipped, "", {}});
      return;
    }
    if (first_on_host_)
      add(examine_disk({"output folder", config_.output.directory, options_.disk_bytes,
                        options_.least_output_gb_per_second, "doctor.least_output_gb_per_second"}));
    if (several_hosts_) append(findings_, shared_folder_finding(session_, config_.output.directory));
  }

  ExitCode report() {
    patience_.begin("report");
    const std::vector<ReportRow> rows = merged_rows(gather_findings(session_, findings_));
    const auto worst = static_cast<Verdict>(broadcast_count(
        session_, static_cast<int64_t>(session_.is_root() ? worst_of(rows) : Verdict::kPass)));
    session_.together([&] {
      if (session_.is_root()) publish(rows, worst);
    });
    return worst == Verdict::kFail ? ExitCode::kUserError : ExitCode::kDone;
  }

  void publish(const std::vector<ReportRow>& rows, Verdict worst) const {
    const auto count = [&](Verdict verdict) {
      return std::count_if(rows.begin(), rows.end(),
                           [&](const ReportRow& row) { return row.finding.verdict == verdict; });
    };
    const std::set<std::string> hosts(hosts_.begin(), hosts_.end());
    std::ostringstream out;
    out << "longhalo doctor: " << session_.ranks() << (session_.ranks() == 1 ? " rank on " : " ranks on ")
        << hosts.size() << (hosts.size() == 1 ? " host\n" : " hosts\n") << table_of(rows);
    if (!pairs_.empty())
      out << "\nhalos between ranks: GB/s above the diagonal, microseconds below it\n"
          << matrix_text(pairs_, session_.ranks(), options_.halo_bytes);
    out << "\ndoctor: " << (worst == Verdict::kFail ? "fail" : "pass") << " (" << count(Verdict::kFail)
        << " failed, " << count(Verdict::kWarn) << (count(Verdict::kWarn) == 1 ? " warning, " : " warnings, ")
        << count(Verdict::kPass) << " passed, " << count(Verdict::kSkipped) << " skipped)\n";
    nlohmann::json json = {{"doctor", worst == Verdict::kFail ? "fail" : "pass"},
                           {"worst", name_of(worst)},
                           {"time", local_time_text()},
                           {"ranks", session_.ranks()},
                           {"hosts", hosts_},
                           {"checks", json_of(rows)}};
    if (!pairs_.empty()) json["halo"] = json_of(pairs_, session_.ranks(), transport_, options_.halo_bytes);
    publish_report(options_.json, json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n",
                   out.str());
  }

  std::filesystem::path link_folder() const {
    return std::filesystem::path(options_.sysfs) / "class/infiniband";
  }

  void add(Finding finding) { findings_.push_back(std::move(finding)); }

  const MpiSession& session_;
  const Config& config_;
  const Config::Doctor& options_;
  Patience patience_;
  std::vector<std::string> hosts_;  // by rank
  bool several_hosts_ = false, first_on_host_ = false;
  std::vector<Finding> findings_;  // of this rank
  std::string transport_;
  std::vector<PairTime> pairs_;
};

}  // namespace

ExitCode run_doctor(const MpiSession& session, const Config& config) {
  return Doctor(session, config).run();
}

}  // namespace longhalo

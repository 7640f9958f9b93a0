// How the doctor judges what it finds, each check with what is well and what is not; the reading of files and
// of NVML with stand-ins.
#include "doctor/doctor_cores.hpp"
#include "doctor/doctor_disks.hpp"
#include "doctor/doctor_launch.hpp"
#include "doctor/doctor_links.hpp"
#include "doctor/doctor_ports.hpp"
#include "doctor/doctor_rdma.hpp"
#include "doctor/doctor_report.hpp"

#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "app/model_setup.hpp"
#include "doctor/doctor_device.hpp"

namespace longhalo {
namespace {

namespace fs = std::filesystem;

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("longhalo_doctor_test." + std::to_string(::getpid()))) {
    fs::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }
  void write(const fs::path& name, const std::string& contents) const {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << contents;
  }

 private:
  fs::path path_;
};

Finding host_finding(std::string place, std::string found, Verdict verdict = Verdict::kPass) {
  return {"GPU clocks", Scope::kHost, std::move(place), std::move(found), "", verdict, "", {}};
}

TEST(DoctorLaunch, RanksThatTheLauncherDidNotConnectAreCaught) {
  EXPECT_EQ(launch_finding(4, {{"OMPI_COMM_WORLD_SIZE", "4"}}).verdict, Verdict::kPass);
  const Finding alone = launch_finding(1, {{"OMPI_COMM_WORLD_SIZE", "4"}});
  EXPECT_EQ(alone.verdict, Verdict::kFail);
  EXPECT_NE(alone.remedy.find("mpirun of the MPI"), std::string::npos) << alone.remedy;
  EXPECT_EQ(launch_finding(1, {{"PMI_SIZE", "2"}}).verdict, Verdict::kFail);

  const Environment step = {{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_NTASKS", "8"}};
  EXPECT_EQ(launch_finding(8, step).verdict, Verdict::kPass);
  const Finding split = launch_finding(1, step);
  EXPECT_EQ(split.verdict, Verdict::kFail);
  EXPECT_NE(split.remedy.find("srun --mpi=pmix"), std::string::npos) << split.remedy;
}

TEST(DoctorLaunch, MpirunInAnAllocationIsStartedByAStepOfOneTaskANode) {
  const Environment within = {{"OMPI_COMM_WORLD_SIZE", "8"},
                              {"SLURM_STEP_ID", "0"},
                              {"SLURM_STEP_NUM_TASKS", "2"},
                              {"SLURM_NTASKS", "8"}};
  EXPECT_EQ(launch_finding(8, within).verdict, Verdict::kPass);
}

TEST(DoctorLaunch, AJobScriptThatForgotTheLauncherIsWarned) {
  const Finding row = launch_finding(1, {{"SLURM_NTASKS", "16"}});
  EXPECT_EQ(row.verdict, Verdict::kWarn);
  EXPECT_NE(row.wanted.find("16"), std::string::npos);
  EXPECT_EQ(launch_finding(1, {{"OMPI_COMM_WORLD_SIZE", "1"}, {"SLURM_NTASKS", "16"}}).verdict,
            Verdict::kWarn)
      << "what a single rank says of itself";
  EXPECT_EQ(launch_finding(1, {}).verdict, Verdict::kPass);
  EXPECT_EQ(launch_finding(1, {{"OMPI_COMM_WORLD_SIZE", "many"}}).verdict, Verdict::kPass)
      << "no number, no word";
}

RankCores rank_on(std::initializer_list<int> cores, int64_t threads) {
  RankCores rank;
  for (const int core : cores)
    rank.allowed[static_cast<size_t>(core) / 64] |= uint64_t{1} << core % 64;
  rank.threads = threads;
  return rank;
}

TEST(DoctorCores, EachThreadHasACore) {
  EXPECT_EQ(cores_finding({rank_on({0, 1}, 2), rank_on({8000, 8191}, 2)}).verdict, Verdict::kPass);
  EXPECT_EQ(cores_finding({rank_on({0, 1, 2, 3}, 2), rank_on({0, 1, 2, 3}, 2)}).verdict, Verdict::kPass)
      << "ranks that are not bound share all cores";
  EXPECT_EQ(cores_finding({rank_on({}, 8)}).verdict, Verdict::kSkipped);

  const Finding crowd = cores_finding({rank_on({0, 1}, 1), rank_on({0, 1}, 1), rank_on({0, 1}, 1)});
  EXPECT_EQ(crowd.verdict, Verdict::kWarn);
  EXPECT_EQ(crowd.found, "3 ranks with 3 threads in all on 2 cores");
  EXPECT_NE(crowd.remedy.find("fewer ranks"), std::string::npos) << crowd.remedy;
  const Finding bound_alike = cores_finding({rank_on({5}, 1), rank_on({5}, 1)});
  EXPECT_EQ(bound_alike.verdict, Verdict::kWarn) << "of a host's many cores, two ranks have one";
  const Finding threads = cores_finding({rank_on({0}, 8), rank_on({1}, 8)});
  EXPECT_EQ(threads.verdict, Verdict::kWarn);
  EXPECT_NE(threads.remedy.find("OMP_NUM_THREADS"), std::string::npos) << threads.remedy;
  EXPECT_EQ(threads.values["cores"], 2);

  RankCores unusable = rank_on({0, 1}, 2);
  std::string_view("OMP_NUM_THREADS='0'").copy(unusable.unusable.data(), unusable.unusable.size() - 1);
  const Finding ignored = cores_finding({rank_on({2, 3}, 2), unusable});
  EXPECT_EQ(ignored.verdict, Verdict::kWarn);
  EXPECT_NE(ignored.found.find("OMP_NUM_THREADS='0' is no number of threads"), std::string::npos)
      << ignored.found;
  EXPECT_NE(ignored.remedy.find("from 1 on"), std::string::npos) << ignored.remedy;
}

TEST(DoctorCores, OmpNumThreadsIsReadAsOpenMpReadsIt) {
  for (const auto& [value, threads] : {std::pair{"4", 4},
                                       {" 8 ", 8},
                                       {"3,2", 3},
                                       {"3, 2 ,1", 3},
                                       {"0", 0},
                                       {"-1", 0},
                                       {"", 0},
                                       {"many", 0},
                                       {"4x", 0},
                                       {"4,", 0},
                                       {",4", 0},
                                       {"4,0", 0},
                                       {"4.5", 0},
                                       {"99999999999", 0}})
    EXPECT_EQ(omp_threads(value), threads) << "'" << value << "'";
}

TEST(DoctorAlike, WhatDiffersIsNamedWithBothValues) {
  const auto facts = [](const char* mpi, const char* hdf5) {
    return std::vector<Fact>{{"versions", "mpi", mpi, Verdict::kFail},
                             {"versions", "hdf5", hdf5, Verdict::kWarn}};
  };
  const std::vector<Finding> alike =
      compare_facts({{0, "a", facts("4.1", "1.10")}, {1, "b", facts("4.1", "1.10")}});
  ASSERT_EQ(alike.size(), 1u);
  EXPECT_EQ(alike[0].verdict, Verdict::kPass);
  EXPECT_EQ(alike[0].found, "mpi 4.1, hdf5 1.10");

  const std::vector<Finding> other = compare_facts(
      {{0, "a", facts("4.1", "1.10")}, {1, "a", facts("4.1", "1.10")}, {2, "b", facts("5.0", "1.10")}});
  ASSERT_EQ(other.size(), 2u);
  EXPECT_EQ(other[0].verdict, Verdict::kFail);
  EXPECT_EQ(other[0].found, "4.1 on rank 0 (a), 5.0 on rank 2 (b)");
  EXPECT_EQ(other[0].place, "mpi of 1 rank");
  EXPECT_EQ(other[1].found, "hdf5 1.10");
}

TEST(DoctorAlike, AVariableThatOneRankLacks) {
  const std::vector<Fact> own = environment_facts({{"NCCL_IB_HCA", "mlx5_0"},
                                                   {"HOME", "/root"},
                                                   {"LONGHALO_RUN__DEVICE", "cpu"},
                                                   {"LONGHALO_EXECUTABLE", "x"}});
  ASSERT_EQ(own.size(), 2u) << "only what steers the job";
  const std::vector<Finding> rows = compare_facts({{0, "a", own}, {1, "b", {own[0]}}});
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].verdict, Verdict::kWarn);
  EXPECT_NE(rows[0].found.find("not set on rank 1 (b)"), std::string::npos) << rows[0].found;
  EXPECT_NE(rows[0].remedy.find("mpirun -x"), std::string::npos);
}

TEST(DoctorReport, AlikeFindingsAreOneRow) {
  const std::vector<ReportRow> rows =
      merged_rows({{0, "a", {host_finding("GPU 0", "well"), host_finding("GPU 1", "well")}},
                   {8, "b", {host_finding("GPU 0", "well"), host_finding("GPU 1", "slow", Verdict::kFail)}}});
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].where(), "hosts a (GPU 0, GPU 1), b (GPU 0)");
  EXPECT_EQ(rows[1].where(), "host b: GPU 1");
  EXPECT_EQ(worst_of(rows), Verdict::kFail);
  const nlohmann::json json = json_of(rows);
  EXPECT_EQ(json[1]["verdict"], "fail");
  EXPECT_EQ(json[0]["found_by"].size(), 3u);
  EXPECT_NE(table_of(rows).find("fail"), std::string::npos);
}

TEST(DoctorReport, SkippedChecksAreNoWarnings) {
  const auto skipped = merged_rows({{0, "a", {host_finding("", "no GPU", Verdict::kSkipped)}}});
  EXPECT_EQ(worst_of(skipped), Verdict::kPass);
  EXPECT_EQ(worst_of(merged_rows({{0, "a", {host_finding("", "hot", Verdict::kWarn)}}})), Verdict::kWarn);
}

TEST(DoctorReport, RangesOfRanks) {
  EXPECT_EQ(number_ranges({0, 1, 2, 3, 5, 7, 8}), "0-3, 5, 7, 8");
  EXPECT_EQ(number_ranges({4}), "4");
}

TEST(DoctorReport, AnErrorBecomesAFindingWithItsRemedy) {
  const Finding row = failed_check("scratch", Scope::kHost, UserError("cannot write it", "/x", "free space"));
  EXPECT_EQ(row.found, "cannot write it (/x)");
  EXPECT_EQ(row.remedy, "free space");
  EXPECT_EQ(row.verdict, Verdict::kFail);
}

TEST(DoctorReport, AFindingSurvivesItsWayToRankZero) {
  Finding sent = host_finding("GPU 3", "slow", Verdict::kWarn);
  sent.remedy = "cool it", sent.values = {{"celsius", 91}};
  const Finding got = nlohmann::json::parse(nlohmann::json(sent).dump()).get<Finding>();
  EXPECT_EQ(nlohmann::json(got), nlohmann::json(sent));
  EXPECT_EQ(got.scope, Scope::kHost);
}

TEST(DoctorLinks, AllPairsNeighboursFirst) {
  const std::vector<PairTime> pairs = pairs_to_measure(5);
  std::set<std::pair<int, int>> seen;
  int distance = 1;
  for (const PairTime& pair : pairs) {
    EXPECT_GE(pair.second - pair.first, distance);
    distance = pair.second - pair.first;
    seen.insert({pair.first, pair.second});
  }
  EXPECT_EQ(seen.size(), 10u);
  EXPECT_EQ(pairs.size(), 10u);
  EXPECT_TRUE(pairs_to_measure(1).empty());
  const std::vector<PairTime> many = pairs_to_measure(4096);
  EXPECT_EQ(many.size(), 4095u) << "in a job so large the neighbours alone";
  EXPECT_EQ(many.back().second, 4095);
}

constexpr int64_t kBytes = 1'000'000'000;  // 1 s is 1 GB/s

TEST(DoctorLinks, TheSlowestPairAndHostAreNamed) {
  const std::vector<std::string> hosts = {"a", "a", "b", "c"};
  std::vector<PairTime> pairs = pairs_to_measure(4);
  for (PairTime& pair : pairs)
    pair.seconds = pair.second == 3 ? 1 : 0.1, pair.latency_seconds = 2e-6;
  pairs[1].seconds = 0.125;  // ranks 1 and 2
  for (PairTime& pair : pairs)
    if (pair.first == 2 && pair.second == 3) pair.seconds = 1.25;

  const std::vector<Finding> by_median = pair_findings(pairs, hosts, "nccl", kBytes, 0);
  ASSERT_EQ(by_median.size(), 2u);
  EXPECT_EQ(by_median[0].place, "within a host");
  EXPECT_EQ(by_median[0].verdict, Verdict::kPass);
  EXPECT_EQ(by_median[1].place, "between hosts");
  EXPECT_NE(by_median[1].found.find("slowest 0.8 GB/s, ranks 2 and 3 (b and c)"), std::string::npos)
      << by_median[1].found;
  EXPECT_EQ(by_median[1].values["slowest_host"], "c");

  const std::vector<Finding> with_floor = pair_findings(pairs, hosts, "nccl", kBytes, 5);
  EXPECT_EQ(with_floor[0].verdict, Verdict::kPass) << "10 GB/s";
  EXPECT_EQ(with_floor[1].verdict, Verdict::kFail);
  EXPECT_EQ(with_floor[1].values["pairs_below"], 3);
  EXPECT_NE(with_floor[1].remedy.find("slowest host on average is c"), std::string::npos)
      << with_floor[1].remedy;
}

TEST(DoctorLinks, OneBadPairAmongMany) {
  std::vector<PairTime> pairs = pairs_to_measure(4);
  for (PairTime& pair : pairs)
    pair.seconds = 0.1, pair.latency_seconds = 1e-6;
  const std::vector<std::string> one(4, "a");
  EXPECT_EQ(pair_findings(pairs, one, "mpi", kBytes, 0)[0].verdict, Verdict::kPass);
  pairs[2].seconds = 0.3;
  const Finding slow = pair_findings(pairs, one, "mpi", kBytes, 0)[0];
  EXPECT_EQ(slow.verdict, Verdict::kWarn);
  EXPECT_NE(slow.found.find("ranks 2 and 3 (both on a)"), std::string::npos) << slow.found;
  pairs[0].right = false;
  const std::vector<Finding> damaged = pair_findings(pairs, one, "mpi", kBytes, 0);
  EXPECT_EQ(damaged[0].check, "halo contents");
  EXPECT_EQ(damaged[0].verdict, Verdict::kFail);
  EXPECT_EQ(pair_findings({}, {"a"}, "", kBytes, 1)[0].verdict, Verdict::kSkipped);
}

TEST(DoctorLinks, TheMatrixIsSymmetricWithHoles) {
  std::vector<PairTime> pairs = {{0, 1, 0.5, 1e-6, true}, {1, 2, 0.25, 3e-6, true}};
  const nlohmann::json json = json_of(pairs, 3, "mpi", kBytes);
  EXPECT_DOUBLE_EQ(json["gb_per_second"][1][0], 2);
  EXPECT_DOUBLE_EQ(json["gb_per_second"][1][2], 4);
  EXPECT_TRUE(json["gb_per_second"][0][2].is_null());
  EXPECT_TRUE(json["latency_seconds"][1][1].is_null());
  EXPECT_EQ(matrix_text(pairs, 3, kBytes),
            "               0        1        2\n      0        -        2        -\n"
            "      1        1        -        4\n      2        -        3        -\n");
}

LinkPort port(const char* device, std::map<std::string, int64_t> counters, const char* state = "4: ACTIVE",
              const char* rate = "400 Gb/sec (4X NDR)") {
  return {device, "1", state, rate, "InfiniBand", std::move(counters)};
}

TEST(DoctorPorts, ErrorsOfNowAndOfEarlierTimes) {
  const std::vector<LinkPort> before = {port("mlx5_0", {{"symbol_error", 3}, {"port_xmit_data", 10}}),
                                        port("mlx5_1", {{"link_downed", 2}}),
                                        port("mlx5_2", {{"packet_seq_err", 7}})};
  std::vector<LinkPort> after = before;
  const auto verdicts = [&] {
    std::vector<Verdict> all;
    for (const Finding& row : port_findings(before, after))
      if (row.check == "link errors") all.push_back(row.verdict);
    return all;
  };
  EXPECT_EQ(verdicts(), (std::vector{Verdict::kWarn, Verdict::kWarn, Verdict::kPass}));
  after[0].counters["port_xmit_data"] = 9999;  // no error
  after[2].counters["packet_seq_err"] = 8;
  EXPECT_EQ(verdicts(), (std::vector{Verdict::kWarn, Verdict::kWarn, Verdict::kWarn}));
  after[0].counters["symbol_error"] = 5;
  EXPECT_EQ(verdicts()[0], Verdict::kFail);
  const std::vector<Finding> rows = port_findings(before, after);
  EXPECT_NE(rows[1].found.find("symbol_error +2"), std::string::npos) << rows[1].found;
  EXPECT_EQ(rows[1].place, "mlx5_0 port 1");
}

TEST(DoctorPorts, PortsThatAreDownOrSlower) {
  const std::vector<Finding> rows =
      port_findings({}, {port("mlx5_0", {}), port("mlx5_1", {}, "1: DOWN"),
                         port("mlx5_2", {}, "4: ACTIVE", "100 Gb/sec (4X EDR)")});
  ASSERT_EQ(rows.size(), 6u);
  EXPECT_EQ(rows[2].verdict, Verdict::kWarn);
  EXPECT_NE(rows[2].found.find("DOWN"), std::string::npos);
  EXPECT_EQ(rows.back().verdict, Verdict::kWarn);
  EXPECT_NE(rows.back().found.find("different rates"), std::string::npos);
  EXPECT_EQ(port_findings({}, {})[0].verdict, Verdict::kSkipped);
}

TEST(DoctorRdma, WhatTheKernelAndTheDriverHave) {
  const Folder sysfs;
  EXPECT_FALSE(read_rdma(sysfs.path(), {}).peer_module);
  EXPECT_FALSE(read_rdma(sysfs.path(), {}).has_adapter);
  sysfs.write("class/infiniband/mlx5_0/node_type", "1: CA");
  RdmaState state = read_rdma(sysfs.path(), false);
  EXPECT_TRUE(state.has_adapter);
  const Finding none = rdma_finding(state, true, true);
  EXPECT_EQ(none.verdict, Verdict::kWarn);
  EXPECT_NE(none.remedy.find("nvidia_peermem"), std::string::npos);
  EXPECT_EQ(rdma_finding(state, true, false).verdict, Verdict::kSkipped) << "one host needs none";
  EXPECT_EQ(rdma_finding(state, false, true).verdict, Verdict::kSkipped) << "nor do CPU ranks";
  EXPECT_EQ(rdma_finding(read_rdma(sysfs.path(), true), true, true).verdict, Verdict::kPass);
  sysfs.write("module/nvidia_peermem/version", "580");
  EXPECT_EQ(rdma_finding(read_rdma(sysfs.path(), {}), true, true).verdict, Verdict::kPass);
}

TEST(DoctorDisks, AFolderIsMeasuredAndLeftAsItWas) {
  const Folder folder;
  const DiskTest test{"scratch", folder.path() / "not" / "there", 3 << 20, 0, ""};
  const Finding row = examine_disk(test);
  EXPECT_NE(row.verdict, Verdict::kFail) << row.found;
  EXPECT_EQ(row.values["bytes"], 3 << 20);
  EXPECT_GT(row.values["write_gb_per_second"], 0);
  EXPECT_TRUE(fs::is_empty(folder.path())) << "nothing is made and nothing is left";
}

TEST(DoctorDisks, FloorsAndFullDisks) {
  const DiskTest test{"scratch", "/scratch", 1 << 28, 2, "doctor.least_scratch_gb_per_second"};
  DiskTimes times{1'000'000'000, int64_t{1} << 40, 0.4, 0.1, 0.2, true, true};
  EXPECT_EQ(disk_finding(test, times).verdict, Verdict::kPass) << "2.5 and 5 GB/s";
  times.read_seconds = 0.6;
  const Finding slow = disk_finding(test, times);
  EXPECT_EQ(slow.verdict, Verdict::kFail);
  EXPECT_NE(slow.wanted.find("doctor.least_scratch_gb_per_second"), std::string::npos);
  times.read_seconds = 0.2, times.is_in_memory = true;
  const Finding in_memory = disk_finding(test, times);
  EXPECT_EQ(in_memory.verdict, Verdict::kWarn);
  EXPECT_NE(in_memory.found.find("tmpfs"), std::string::npos) << in_memory.found;
  times.free_bytes = 100 << 20;
  EXPECT_EQ(disk_finding(test, times).verdict, Verdict::kWarn);
  times.is_right = false;
  EXPECT_EQ(disk_finding(test, times).verdict, Verdict::kFail);
}

TEST(DoctorDisks, AFolderInMemoryIsSeen) {
  struct statfs status {};
  if (::statfs("/dev/shm", &status) != 0 || status.f_type != TMPFS_MAGIC || ::access("/dev/shm", W_OK) != 0)
    GTEST_SKIP() << "/dev/shm is no tmpfs that this user may write to";
  EXPECT_TRUE(measure_disk("/dev/shm", 1 << 20).is_in_memory);
  EXPECT_NE(examine_disk({"output folder", "/dev/shm/not/there", 1 << 20, 0, ""}).verdict, Verdict::kPass);
}

TEST(DoctorDisks, AFolderThatCannotBeWrittenTo) {
  const Finding row = examine_disk({"output folder", "/proc/longhalo", 1 << 20, 0, ""});
  EXPECT_EQ(row.verdict, Verdict::kFail);
  EXPECT_NE(row.found.find("/proc"), std::string::npos) << row.found;
  EXPECT_FALSE(row.remedy.empty());
}

TEST(DoctorDisks, WhatIsNoFolder) {
  const Folder folder;
  folder.write("file", "text");
  fs::create_symlink("nowhere", folder.path() / "link");
  for (const char* name : {"file", "file/below", "link", "link/below"}) {
    const Finding row = examine_disk({"scratch", folder.path() / name, 1 << 20, 0, ""});
    EXPECT_EQ(row.verdict, Verdict::kFail) << name << ": the job could not make a folder there";
    EXPECT_NE(row.remedy.find("check the path"), std::string::npos) << row.remedy;
  }
}

TEST(DoctorDisks, SharedMemory) {
  const Folder folder;
  EXPECT_EQ(shared_memory_finding(folder.path(), 1).verdict, Verdict::kPass);
  const Finding full = shared_memory_finding(folder.path(), int64_t{1} << 60);
  EXPECT_EQ(full.verdict, Verdict::kFail);
  EXPECT_NE(full.remedy.find("--shm-size"), std::string::npos);
  EXPECT_EQ(shared_memory_finding(folder.path() / "none", 1).verdict, Verdict::kWarn);
}

TEST(DoctorDevice, ASlowGpuIsNamed) {
  const std::vector<std::string> hosts = {"a", "a", "b", "b"};
  const std::vector<Finding> alike = rate_findings({700e12, 690e12, 710e12, 695e12}, hosts);
  ASSERT_EQ(alike.size(), 1u);
  EXPECT_EQ(alike[0].verdict, Verdict::kPass);
  const std::vector<Finding> slow = rate_findings({700e12, 690e12, 710e12, 500e12}, hosts);
  ASSERT_EQ(slow.size(), 1u);
  EXPECT_EQ(slow[0].verdict, Verdict::kWarn);
  EXPECT_EQ(slow[0].place, "rank 3 on b");
  EXPECT_TRUE(rate_findings({0, 0}, {"a", "a"}).empty())
      << "none could be measured, which is a finding of its own";
}

}  // namespace
}  // namespace longhalo

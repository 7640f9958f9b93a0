#include "doctor/doctor_cores.hpp"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <type_traits>

#include "core/text.hpp"
#include "core/waiting.hpp"

namespace longhalo {

Finding cores_finding(const std::vector<RankCores>& ranks) {
  std::array<uint64_t, RankCores::kMostCores / 64> all{};
  int64_t threads = 0;
  for (const RankCores& rank : ranks) {
    for (size_t i = 0; i < all.size(); ++i)
      all[i] |= rank.allowed[i];
    threads += rank.threads;
  }
  int64_t cores = 0;
  for (const uint64_t word : all)
    cores += std::popcount(word);
  const auto count = static_cast<int64_t>(ranks.size());
  Finding row{"cores", Scope::kHost, "", "", "a core for each thread of a rank", Verdict::kPass, "", {}};
  row.values = {{"ranks", count}, {"threads", threads}, {"cores", cores}};
  if (cores == 0) {
    row.found = "this system does not say which cores ranks may use";
    row.verdict = Verdict::kSkipped;
    return row;
  }
  row.found =
      text(count, count == 1 ? " rank with " : " ranks with ", threads,
           threads == 1 ? " thread on " : " threads in all on ", cores, cores == 1 ? " core" : " cores");
  const auto unusable = std::find_if(ranks.begin(), ranks.end(),
                                     [](const RankCores& rank) { return rank.unusable[0] != '\0'; });
  if (unusable != ranks.end()) {
    row.verdict = Verdict::kWarn;
    row.found += text("; ", unusable->unusable.data(),
                      " is no number of threads and is passed by: ranks take their share of the cores");
    row.remedy = "set OMP_NUM_THREADS to the cores of a rank, a whole number from 1 on, or leave it out";
    return row;
  }
  if (threads <= cores) return row;
  row.verdict = Verdict::kWarn;
  row.remedy = text(count > cores ? "start fewer ranks on this host"
                                  : "set run.threads or OMP_NUM_THREADS to what a rank has",
                    ", or give them more cores (sbatch --cpus-per-task, mpirun --map-by slot:pe=N)");
  return row;
}

Finding cores_of_host(const MpiSession& session, const std::vector<std::string>& hosts, int threads,
                      const std::string& unusable) {
  static_assert(std::is_trivially_copyable_v<RankCores>, "ranks send it as bytes");
  RankCores own;
  own.threads = threads;
  unusable.copy(own.unusable.data(), own.unusable.size() - 1);
  cpu_set_t* set = reinterpret_cast<cpu_set_t*>(own.allowed.data());
  if (::sched_getaffinity(0, sizeof own.allowed, set) != 0) own.allowed = {};
  std::vector<RankCores> all(hosts.size());
  const Waiting waiting("the cores of all ranks");
  check_mpi(MPI_Allgather(&own, sizeof own, MPI_BYTE, all.data(), sizeof own, MPI_BYTE, session.comm()),
            "MPI_Allgather");
  std::vector<RankCores> of_host;
  for (size_t rank = 0; rank < hosts.size(); ++rank)
    if (hosts[rank] == session.host()) of_host.push_back(all[rank]);
  return cores_finding(of_host);
}

}  // namespace longhalo

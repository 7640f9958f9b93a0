#include "doctor/doctor_launch.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <string_view>

#include "app/job_log.hpp"
#include "core/text.hpp"
#include "storage/hdf5.hpp"
#include "storage/sha256.hpp"
#include "telemetry/run_log.hpp"

namespace longhalo {
namespace {

constexpr const char* kSrunRemedy =
    "start with `srun --mpi=pmix` (srun --mpi=list names what Slurm has), or with mpirun inside the "
    "allocation";
constexpr const char* kMpirunRemedy =
    "start with the mpirun of the MPI that longhalo is built with (ldd longhalo | grep mpi; which mpirun)";

constexpr std::string_view kLibraryPrefixes[] = {"NCCL_", "UCX_", "HDF5_", "OMP_", "OPENBLAS_"};

std::optional<int> number_in(const Environment& environment, std::string_view name) {
  const auto found = environment.find(name);
  if (found == environment.end()) return std::nullopt;
  const std::string& words = found->second;
  int number = 0;
  const auto [end, error] = std::from_chars(words.data(), words.data() + words.size(), number);
  if (error != std::errc() || end != words.data() + words.size() || number < 1) return std::nullopt;
  return number;
}

Finding launch_row(std::string found, std::string wanted, Verdict verdict, const char* remedy) {
  return {"launch", Scope::kJob, "", std::move(found), std::move(wanted), verdict, remedy};
}

std::string mpi_library() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> words{};
  int length = 0;
  check_mpi(MPI_Get_library_version(words.data(), &length), "MPI_Get_library_version");
  const std::string all(words.data(), static_cast<size_t>(length));
  return all.substr(0, all.find_first_of(",\n"));
}

// Asked of the library that runs, which need not be the one that LongHalo was built with.
std::string nccl_library() {
  using GetVersion = int (*)(int*);
  const auto ask = reinterpret_cast<GetVersion>(::dlsym(RTLD_DEFAULT, "ncclGetVersion"));
  int version = 0;
  if (ask == nullptr || ask(&version) != 0) return "none";
  return text(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::string executable_digest() {
  try {
    return sha256_of_file("/proc/self/exe").substr(0, 12);
  } catch (const std::exception&) {  // no /proc
    return "unknown";
  }
}

const Fact* fact_of(const RankFacts& rank, const Fact& like) {
  const auto found = std::find_if(rank.facts.begin(), rank.facts.end(), [&](const Fact& one) {
    return one.check == like.check && one.name == like.name;
  });
  return found == rank.facts.end() ? nullptr : &*found;
}

std::string value_on(const RankFacts& rank, const Fact& fact) {
  const Fact* own = fact_of(rank, fact);
  return own == nullptr ? "not set" : own->value;
}

// Every fact that any rank has, by the first rank that has it.
std::vector<Fact> all_facts(const std::vector<RankFacts>& all) {
  std::vector<Fact> facts;
  for (const RankFacts& rank : all)
    for (const Fact& fact : rank.facts)
      if (std::none_of(facts.begin(), facts.end(), [&](const Fact& known) {
            return known.check == fact.check && known.name == fact.name;
          }))
        facts.push_back(fact);
  return facts;
}

const char* remedy_of(const std::string& check) {
  if (check == "environment")
    return "give all ranks the same variables: mpirun -x NAME, or srun --export=ALL from one shell";
  if (check == "GPU driver and model")
    return "ask for nodes of one kind (sbatch --constraint), or expect the slowest";
  return "run one build, with one set of modules, on all hosts";
}

}  // namespace

Environment process_environment() {
  Environment all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view line = *entry;
    const size_t equals = line.find('=');
    if (equals != std::string_view::npos) all.emplace(line.substr(0, equals), line.substr(equals + 1));
  }
  return all;
}

Finding launch_finding(int ranks, const Environment& environment) {
  const std::string seen = text(ranks, ranks == 1 ? " rank" : " ranks");
  // mpirun's own word counts more than Slurm's: in an allocation mpirun is started by a step of one task a
  // node. A rank that nobody connected may say OMPI_COMM_WORLD_SIZE=1 of itself, so a single rank is not
  // believed yet.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    const std::optional<int> started = number_in(environment, name);
    if (!started || (*started == ranks && ranks == 1)) continue;
    const std::string wanted = text(*started, ", as ", name, " says");
    if (*started == ranks) return launch_row(text(seen, ", as ", name, " says"), wanted, Verdict::kPass, "");
    return launch_row(text("MPI sees ", seen), wanted, Verdict::kFail, kMpirunRemedy);
  }
  if (environment.contains("SLURM_STEP_ID")) {
    std::optional<int> tasks = number_in(environment, "SLURM_STEP_NUM_TASKS");
    if (!tasks) tasks = number_in(environment, "SLURM_NTASKS");
    if (tasks) {
      const std::string wanted = text(*tasks, " tasks of the Slurm step");
      if (*tasks == ranks)
        return launch_row(text(seen, ", as Slurm's step has tasks"), wanted, Verdict::kPass, "");
      return launch_row(text("MPI sees ", seen), wanted, Verdict::kFail, kSrunRemedy);
    }
  }
  if (const std::optional<int> tasks = number_in(environment, "SLURM_NTASKS"); tasks && *tasks != ranks)
    return launch_row(seen, text(*tasks, ", as SLURM_NTASKS says"), Verdict::kWarn, kSrunRemedy);
  return launch_row(seen, "as many as the launcher was asked for", Verdict::kPass, "");
}

void refuse_unconnected_rank(const MpiSession& session) {
  if (session.ranks() > 1) return;
  const Finding row = launch_finding(1, process_environment());
  if (row.verdict != Verdict::kFail) return;
  session.together([&] {
    throw UserError(text(row.found, ", but there should be ", row.wanted), "the launcher", row.remedy);
  });
}

std::vector<Fact> version_facts() {
  const auto version = [](const char* name, std::string value, Verdict if_different = Verdict::kFail) {
    return Fact{"versions", name, std::move(value), if_different};
  };
  return {version("longhalo", LONGHALO_VERSION),   version("executable", executable_digest(), Verdict::kWarn),
          version("compiler", compiler_version()), version("mpi", mpi_library()),
          version("hdf5", hdf5_version()),         version("nccl", nccl_library())};
}

Fact config_fact(const Config& config) {
  return {"config", "settings", sha256_of_text(dump_yaml(config)).substr(0, 12), Verdict::kFail};
}

std::vector<Fact> environment_facts(const Environment& environment) {
  std::vector<Fact> facts;
  for (const auto& variable : environment) {
    const std::string& name = variable.first;
    const bool is_setting = name.starts_with("LONGHALO_") && name.find("__") != std::string::npos;
    const bool of_library = std::any_of(std::begin(kLibraryPrefixes), std::end(kLibraryPrefixes),
                                        [&](std::string_view prefix) { return name.starts_with(prefix); });
    if (is_setting || of_library) facts.push_back({"environment", name, variable.second, Verdict::kWarn});
  }
  return facts;
}

std::vector<Finding> compare_facts(const std::vector<RankFacts>& all) {
  std::vector<Finding> findings;
  std::vector<std::string> checks;
  const std::vector<Fact> facts = all_facts(all);
  for (const Fact& fact : facts)
    if (std::find(checks.begin(), checks.end(), fact.check) == checks.end()) checks.push_back(fact.check);
  for (const std::string& check : checks) {
    std::string alike;
    nlohmann::json values = nlohmann::json::object();
    for (const Fact& fact : facts) {
      if (fact.check != check) continue;
      const std::string first = value_on(all.front(), fact);
      const auto other = std::find_if(all.begin(), all.end(),
                                      [&](const RankFacts& rank) { return value_on(rank, fact) != first; });
      if (other == all.end()) {
        alike += text(alike.empty() ? "" : ", ", fact.name, " ", first);
        values[fact.name] = first;
        continue;
      }
      const auto differing = std::count_if(
          all.begin(), all.end(), [&](const RankFacts& rank) { return value_on(rank, fact) != first; });
      findings.push_back({check, Scope::kJob,
                          text(fact.name, " of ", differing, differing == 1 ? " rank" : " ranks"),
                          text(first, " on rank 0 (", all.front().host, "), ", value_on(*other, fact),
                               " on rank ", other->rank, " (", other->host, ")"),
                          "alike on all ranks", fact.if_different, remedy_of(check)});
    }
    if (!alike.empty())
      findings.push_back({check, Scope::kJob, "", alike, "alike on all ranks", Verdict::kPass, "", values});
  }
  return findings;
}

std::vector<Finding> alike_findings(const MpiSession& session, const std::vector<Fact>& own) {
  nlohmann::json sent = nlohmann::json::array();
  for (const Fact& fact : own)
    sent.push_back({fact.check, fact.name, fact.value, static_cast<int>(fact.if_different)});
  const std::vector<std::string> hosts = session.hosts();
  std::vector<RankFacts> all;
  for (const std::string& words :
       gather_text(session, sent.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace))) {
    const int rank = static_cast<int>(all.size());
    RankFacts& one = all.emplace_back(RankFacts{rank, hosts[static_cast<size_t>(rank)], {}});
    for (const nlohmann::json& fact : nlohmann::json::parse(words))
      one.facts.push_back({fact[0], fact[1], fact[2], static_cast<Verdict>(fact[3].get<int>())});
  }
  if (all.empty()) return {};
  return compare_facts(all);
}

}  // namespace longhalo

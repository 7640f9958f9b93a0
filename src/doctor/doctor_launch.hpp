// Checks of the start: have all ranks that the launcher was asked for met, and is everything that must be
// alike on all of them alike? A rank that has other libraries than its peers, or was not given NCCL's
// settings, fails in places that do not say so.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "config/config.hpp"
#include "doctor/doctor_report.hpp"

namespace longhalo {

using Environment = std::map<std::string, std::string, std::less<>>;
Environment process_environment();

/// Whether the job has as many ranks as mpirun or srun started. Pure.
Finding launch_finding(int ranks, const Environment& environment);

/// Throws UserError where launch_finding() fails a rank that MPI takes for the only one: it would do the
/// whole job, as would each of the others.
void refuse_unconnected_rank(const MpiSession& session);

/// Something that should have one value on all ranks.
struct Fact {
  std::string check;  // "versions"; facts of a check that are all alike are one row
  std::string name;   // "mpi"
  std::string value;
  Verdict if_different = Verdict::kFail;
};

/// LongHalo, its very file, compiler, MPI, HDF5, NCCL.
std::vector<Fact> version_facts();
/// The effective settings.
Fact config_fact(const Config& config);
/// The variables that steer LongHalo and what it is built on; mpirun takes them to other hosts only with -x.
std::vector<Fact> environment_facts(const Environment& environment);

struct RankFacts {
  int rank = 0;
  std::string host;
  std::vector<Fact> facts;
};
/// A row a check where all is alike, else one for each fact that differs. Pure.
std::vector<Finding> compare_facts(const std::vector<RankFacts>& all);

/// compare_facts() of all ranks on rank 0; empty elsewhere. Collective.
std::vector<Finding> alike_findings(const MpiSession& session, const std::vector<Fact>& own);

}  // namespace longhalo

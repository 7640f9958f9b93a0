// What `longhalo doctor` finds: rows of (check, where, found, wanted, verdict, remedy) of every rank. Rank 0
// gathers them, puts together what several hosts or ranks found alike, and prints a table for people and JSON
// for programs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/mpi_session.hpp"
#include "core/error.hpp"

namespace longhalo {

/// In rising order of what it means for the job.
enum class Verdict { kPass, kSkipped, kWarn, kFail };
std::string_view name_of(Verdict verdict);

/// Whom a finding is about: the whole job (found once), a host (found by its first rank) or a rank.
enum class Scope { kJob, kHost, kRank };

struct Finding {
  std::string check;  // "GPU clocks"
  Scope scope = Scope::kJob;
  std::string place;          // within the host or rank: "GPU 3", "mlx5_0/1"; may be empty
  std::string found, wanted;  // "off", "on"
  Verdict verdict = Verdict::kPass;
  std::string remedy;          // of a warning or failure
  nlohmann::json values = {};  // numbers for the JSON: an object, or null
};
void to_json(nlohmann::json& json, const Finding& finding);
void from_json(const nlohmann::json& json, Finding& finding);

/// The finding of a check that ended in an exception, whose words name the remedy.
Finding failed_check(const std::string& check, Scope scope, const std::exception& error);

/// What one rank found.
struct RankFindings {
  int rank = 0;
  std::string host;
  std::vector<Finding> findings;
};

/// Findings that differ in nothing but where they were made, with the ranks, hosts and places where.
struct ReportRow {
  Finding finding;  // `place` and `values` are the first one's
  struct Member {
    int rank;
    std::string host, place;
    nlohmann::json values;
  };
  std::vector<Member> members;
  /// "job", "hosts a, b", "host a: GPU 0, GPU 1", "ranks 0-3, 5", "rank 2 on a".
  std::string where() const;
};

/// In the order in which they were first found. Pure.
std::vector<ReportRow> merged_rows(const std::vector<RankFindings>& all);

Verdict worst_of(const std::vector<ReportRow>& rows);

/// The rows as people read them, remedies below those that need one.
std::string table_of(const std::vector<ReportRow>& rows);
nlohmann::json json_of(const std::vector<ReportRow>& rows);

/// "0-3, 5". `numbers` are ascending.
std::string number_ranges(const std::vector<int>& numbers);

/// All ranks' findings in rank order, on rank 0; empty elsewhere. Collective.
std::vector<RankFindings> gather_findings(const MpiSession& session, const std::vector<Finding>& own);

}  // namespace longhalo

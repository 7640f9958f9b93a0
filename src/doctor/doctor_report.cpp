#include "doctor/doctor_report.hpp"

#include <algorithm>
#include <iomanip>
#include <map>
#include <set>
#include <sstream>

#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr size_t kMostNames = 4;  // hosts in one cell of the table; JSON has them all

constexpr std::string_view kVerdictNames[] = {"pass", "skipped", "warn", "fail"};

std::string listed(const std::vector<std::string>& names) {
  std::string all;
  for (size_t i = 0; i < std::min(names.size(), kMostNames); ++i)
    all += text(i == 0 ? "" : ", ", names[i]);
  if (names.size() > kMostNames) all += text(" and ", names.size() - kMostNames, " more");
  return all;
}

std::string joined(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names)
    all += text(all.empty() ? "" : ", ", name);
  return all;
}

bool alike(const Finding& a, const Finding& b) {
  return a.check == b.check && a.scope == b.scope && a.found == b.found && a.wanted == b.wanted &&
         a.verdict == b.verdict && a.remedy == b.remedy;
}

std::string where_of_hosts(const std::vector<ReportRow::Member>& members) {
  std::vector<std::string> hosts;
  std::map<std::string, std::vector<std::string>> places;
  for (const ReportRow::Member& member : members) {
    if (!places.contains(member.host)) hosts.push_back(member.host);
    std::vector<std::string>& own = places[member.host];
    if (!member.place.empty()) own.push_back(member.place);
  }
  const std::vector<std::string>& first = places[hosts.front()];
  const bool same_places =
      std::all_of(places.begin(), places.end(), [&](const auto& one) { return one.second == first; });
  const char* word = hosts.size() == 1 ? "host " : "hosts ";
  if (same_places) return text(word, listed(hosts), first.empty() ? "" : ": ", joined(first));
  std::vector<std::string> each;
  for (const std::string& host : hosts)
    each.push_back(places[host].empty() ? host : text(host, " (", joined(places[host]), ")"));
  return text(word, listed(each));
}

std::string where_of_ranks(const std::vector<ReportRow::Member>& members) {
  std::vector<int> ranks;
  std::set<std::string> hosts;
  for (const ReportRow::Member& member : members) {
    if (ranks.empty() || ranks.back() != member.rank) ranks.push_back(member.rank);
    hosts.insert(member.host);
  }
  const std::string place = members.front().place.empty() ? "" : text(": ", members.front().place);
  return text(ranks.size() == 1 ? "rank " : "ranks ", number_ranges(ranks),
              hosts.size() == 1 ? text(" on ", *hosts.begin()) : "", place);
}

}  // namespace

std::string_view name_of(Verdict verdict) {
  return kVerdictNames[static_cast<size_t>(verdict)];
}

void to_json(nlohmann::json& json, const Finding& finding) {
  json = {{"check", finding.check},   {"scope", static_cast<int>(finding.scope)},
          {"place", finding.place},   {"found", finding.found},
          {"wanted", finding.wanted}, {"verdict", static_cast<int>(finding.verdict)},
          {"remedy", finding.remedy}, {"values", finding.values}};
}

void from_json(const nlohmann::json& json, Finding& finding) {
  finding.check = json.at("check");
  finding.scope = static_cast<Scope>(json.at("scope").get<int>());
  finding.place = json.at("place");
  finding.found = json.at("found");
  finding.wanted = json.at("wanted");
  finding.verdict = static_cast<Verdict>(json.at("verdict").get<int>());
  finding.remedy = json.at("remedy");
  finding.values = json.at("values");
}

Finding failed_check(const std::string& check, Scope scope, const std::exception& error) {
  const std::string words = error.what();
  const auto after = [&](const std::string& label) {
    const size_t at = words.find(label);
    if (at == std::string::npos) return std::string();
    const size_t begin = at + label.size();
    return words.substr(begin, words.find('\n', begin) - begin);
  };
  std::string found = words.substr(0, words.find('\n'));
  if (const std::string where = after("\n  where:  "); !where.empty()) found += text(" (", where, ")");
  return {check, scope, "", std::move(found), "no error", Verdict::kFail, after("\n  remedy: ")};
}

std::string ReportRow::where() const {
  switch (finding.scope) {
    case Scope::kJob:
      return finding.place.empty() ? "job" : finding.place;
    case Scope::kHost:
      return where_of_hosts(members);
    case Scope::kRank:
      return where_of_ranks(members);
  }
  throw InvariantError("every scope is known", std::source_location::current());
}

std::vector<ReportRow> merged_rows(const std::vector<RankFindings>& all) {
  std::vector<ReportRow> rows;
  std::vector<std::string> order;  // of checks, so that all rows of one stand together
  for (const RankFindings& one : all) {
    for (const Finding& finding : one.findings) {
      const bool names_places = finding.scope != Scope::kHost;
      auto row = std::find_if(rows.begin(), rows.end(), [&](const ReportRow& known) {
        return alike(known.finding, finding) && (!names_places || known.finding.place == finding.place);
      });
      if (row == rows.end()) row = rows.insert(rows.end(), {finding, {}});
      row->members.push_back({one.rank, one.host, finding.place, finding.values});
      if (std::find(order.begin(), order.end(), finding.check) == order.end()) order.push_back(finding.check);
    }
  }
  std::stable_sort(rows.begin(), rows.end(), [&](const ReportRow& a, const ReportRow& b) {
    return std::find(order.begin(), order.end(), a.finding.check) <
           std::find(order.begin(), order.end(), b.finding.check);
  });
  return rows;
}

Verdict worst_of(const std::vector<ReportRow>& rows) {
  Verdict worst = Verdict::kPass;
  for (const ReportRow& row : rows)
    if (row.finding.verdict != Verdict::kSkipped) worst = std::max(worst, row.finding.verdict);
  return worst;
}

std::string table_of(const std::vector<ReportRow>& rows) {
  size_t check_width = 0, where_width = 0;
  for (const ReportRow& row : rows) {
    check_width = std::max(check_width, row.finding.check.size());
    where_width = std::max(where_width, std::min<size_t>(row.where().size(), 32));
  }
  std::ostringstream out;
  out << std::left;
  for (const ReportRow& row : rows) {
    const Finding& finding = row.finding;
    out << "  " << std::setw(8) << name_of(finding.verdict) << std::setw(static_cast<int>(check_width) + 2)
        << finding.check << std::setw(static_cast<int>(where_width)) << row.where() << "  " << finding.found;
    const bool bad = finding.verdict == Verdict::kWarn || finding.verdict == Verdict::kFail;
    if (bad && !finding.wanted.empty()) out << "; wanted: " << finding.wanted;
    out << '\n';
    if (bad && !finding.remedy.empty()) out << "          remedy: " << finding.remedy << '\n';
  }
  return out.str();
}

nlohmann::json json_of(const std::vector<ReportRow>& rows) {
  nlohmann::json list = nlohmann::json::array();
  for (const ReportRow& row : rows) {
    const Finding& finding = row.finding;
    nlohmann::json members = nlohmann::json::array();
    for (const ReportRow::Member& member : row.members) {
      nlohmann::json one = {{"rank", member.rank}, {"host", member.host}};
      if (!member.place.empty()) one["place"] = member.place;
      if (!member.values.is_null()) one["values"] = member.values;
      members.push_back(std::move(one));
    }
    list.push_back({{"check", finding.check},
                    {"where", row.where()},
                    {"found", finding.found},
                    {"wanted", finding.wanted},
                    {"verdict", name_of(finding.verdict)},
                    {"remedy", finding.remedy},
                    {"found_by", std::move(members)}});
  }
  return list;
}

std::string number_ranges(const std::vector<int>& numbers) {
  std::string all;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1)
      ++last;
    all += text(all.empty() ? "" : ", ", numbers[i]);
    if (last > i) all += text(last == i + 1 ? ", " : "-", numbers[last]);
    i = last + 1;
  }
  return all;
}

std::vector<RankFindings> gather_findings(const MpiSession& session, const std::vector<Finding>& own) {
  // Words of the system may hold bytes that are no UTF-8, which JSON does not take.
  const std::string sent = nlohmann::json(own).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  const std::vector<std::string> hosts = session.hosts();
  std::vector<RankFindings> all;
  for (const std::string& words : gather_text(session, sent)) {
    const int rank = static_cast<int>(all.size());
    all.push_back(
        {rank, hosts[static_cast<size_t>(rank)], nlohmann::json::parse(words).get<std::vector<Finding>>()});
  }
  return all;
}

}  // namespace longhalo

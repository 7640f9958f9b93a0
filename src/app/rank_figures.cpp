#include "app/rank_figures.hpp"

#include <algorithm>
#include <numeric>

namespace longhalo {

using nlohmann::json;

RankFigures::RankFigures(const MpiSession& session, const std::vector<std::string>& hosts, const json& own)
    : hosts_(hosts) {
  for (const std::string& told : gather_text(session, own.dump()))
    all_.push_back(json::parse(told));
}

std::vector<double> RankFigures::values(const std::string& group, const std::string& name) const {
  std::vector<double> values;
  for (const json& told : all_)
    values.push_back(told.at(group).at(name).get<double>());
  return values;
}

double RankFigures::sum(const std::string& group, const std::string& name) const {
  const std::vector<double> all = values(group, name);
  return std::accumulate(all.begin(), all.end(), 0.0);
}

json RankFigures::spread(const std::string& group, const std::string& name) const {
  const std::vector<double> all = values(group, name);
  const auto [least, most] = std::minmax_element(all.begin(), all.end());
  json spread{{"min", *least},
              {"mean", std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size())},
              {"max", *most}};
  if (*least < *most) {
    const auto rank = most - all.begin();
    spread["rank"] = rank;
    spread["host"] = hosts_.at(static_cast<size_t>(rank));
  }
  return spread;
}

json RankFigures::spreads(const std::string& group) const {
  json spreads = json::object();
  for (const auto& [name, value] : all_.at(0).at(group).items())
    spreads[name] = spread(group, name);
  return spreads;
}

}  // namespace longhalo

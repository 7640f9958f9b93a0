#include "doctor/doctor_links.hpp"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <map>
#include <memory>
#include <sstream>

#include "bench/bench_halo.hpp"
#include "comm/message_parts.hpp"
#include "core/clock.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "device/host_buffer.hpp"

namespace longhalo {
namespace {

constexpr int64_t kMostPairs = 2048;
constexpr int64_t kLatencyBytes = 8;
constexpr int64_t kLatencyTurns = 16;
constexpr int64_t kTurns = 2;
constexpr int kRepeats = 5;
constexpr double kSlowShare = 0.5;  // of the median, below which a pair is called slow
constexpr int kMostPrinted = 16;

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double median_seconds(const PairWay& way, int peer, int64_t bytes, int64_t turns) {
  way.exchange(peer, bytes, turns);  // opens connections
  std::vector<double> samples;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const Stopwatch watch;
    way.exchange(peer, bytes, turns);
    samples.push_back(watch.seconds() / static_cast<double>(turns));
  }
  return median_of(std::move(samples));
}

double gb_per_second(const PairTime& pair, int64_t bytes) {
  return static_cast<double>(bytes) / pair.seconds / 1e9;
}

std::string shown(double value) {
  std::ostringstream out;
  if (value < 1000)
    out << std::setprecision(3) << value;
  else
    out << std::fixed << std::setprecision(0) << value;
  return out.str();
}

std::string name_of_pair(const PairTime& pair, const std::vector<std::string>& hosts) {
  const std::string& first = hosts[static_cast<size_t>(pair.first)];
  const std::string& second = hosts[static_cast<size_t>(pair.second)];
  return text("ranks ", pair.first, " and ", pair.second, " (",
              first == second ? text("both on ", first) : text(first, " and ", second), ")");
}

// The host whose pairs are slowest on average; what a bad adapter or cable looks like from outside.
std::string slowest_host(const std::vector<const PairTime*>& pairs, const std::vector<std::string>& hosts,
                         int64_t bytes) {
  std::map<std::string, std::pair<double, int>> sums;
  for (const PairTime* pair : pairs) {
    for (const int rank : {pair->first, pair->second}) {
      auto& [sum, count] = sums[hosts[static_cast<size_t>(rank)]];
      sum += gb_per_second(*pair, bytes);
      ++count;
    }
  }
  const auto mean = [](const auto& one) { return one.second.first / one.second.second; };
  return std::min_element(sums.begin(), sums.end(),
                          [&](const auto& a, const auto& b) { return mean(a) < mean(b); })
      ->first;
}

// Of pairs that are alike: all on one host, or all between two.
Finding judged(const char* place, const std::vector<const PairTime*>& pairs,
               const std::vector<std::string>& hosts, const std::string& transport, int64_t bytes,
               double least) {
  std::vector<double> rates, latencies;
  for (const PairTime* pair : pairs) {
    rates.push_back(gb_per_second(*pair, bytes));
    latencies.push_back(pair->latency_seconds);
  }
  const double median = median_of(rates);
  const size_t at = static_cast<size_t>(std::min_element(rates.begin(), rates.end()) - rates.begin());
  const PairTime& slowest = *pairs[at];
  const double floor = least > 0 ? least : median * kSlowShare;
  const auto below = std::count_if(rates.begin(), rates.end(), [&](double rate) { return rate < floor; });
  const std::string host = slowest_host(pairs, hosts, bytes);

  Finding row{"halo bandwidth", Scope::kJob, place, "", "", Verdict::kPass, "", {}};
  row.found = text("slowest ", shown(rates[at]), " GB/s, ", name_of_pair(slowest, hosts), "; median ",
                   shown(median), " GB/s and ", shown(median_of(latencies) * 1e6), " us over ", transport);
  row.wanted = least > 0 ? text("at least ", shown(least), " GB/s (doctor.least_halo_gb_per_second)")
                         : text("at least half of the median, ", shown(floor), " GB/s");
  row.values = {{"slowest_gb_per_second", rates[at]},
                {"slowest_ranks", {slowest.first, slowest.second}},
                {"slowest_host", host},
                {"median_gb_per_second", median},
                {"median_latency_seconds", median_of(latencies)},
                {"pairs", pairs.size()},
                {"pairs_below", below}};
  if (below == 0) return row;
  row.verdict = least > 0 ? Verdict::kFail : Verdict::kWarn;
  row.found += text("; ", below, " of ", pairs.size(), pairs.size() == 1 ? " pair" : " pairs", " below");
  row.remedy =
      text("the slowest host on average is ", host,
           ": look at its links (rows above), or leave it out (sbatch --exclude); is the transport the one "
           "that is meant (NCCL_DEBUG=INFO tells NCCL's ways, UCX_LOG_LEVEL=info UCX's)?");
  return row;
}

}  // namespace

PairWay host_pair_way(const MpiSession& session, int64_t most) {
  struct Memory {
    std::vector<uint8_t> sent;
    HostBuffer<uint8_t> received;
  };
  const auto memory = std::make_shared<Memory>(
      Memory{halo_pattern(session.rank(), most), HostBuffer<uint8_t>(most, "a message")});
  MPI_Comm comm = session.comm();
  return {
      "MPI, host memory",
      [memory, comm](int peer, int64_t bytes, int64_t turns) {
        const Waiting waiting("halos of a pair", {&peer, 1});
        for (int64_t turn = 0; turn < turns; ++turn) {
          std::vector<MPI_Request> requests;
          for_each_message(memory->received.data(), bytes, [&](uint8_t* part, int count) {
            check_mpi(MPI_Irecv(part, count, MPI_BYTE, peer, 0, comm, &requests.emplace_back()), "MPI_Irecv");
          });
          for_each_message(memory->sent.data(), bytes, [&](const uint8_t* part, int count) {
            check_mpi(MPI_Isend(part, count, MPI_BYTE, peer, 0, comm, &requests.emplace_back()), "MPI_Isend");
          });
          check_mpi(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE),
                    "MPI_Waitall");
        }
      },
      [memory] { std::memset(memory->received.data(), 0xff, static_cast<size_t>(memory->received.size())); },
      [memory](int peer, int64_t bytes) {
        return std::memcmp(memory->received.data(), halo_pattern(peer, bytes).data(),
                           static_cast<size_t>(bytes)) == 0;
      }};
}

std::vector<PairTime> pairs_to_measure(int ranks) {
  std::vector<PairTime> pairs;
  for (int distance = 1; distance < ranks; ++distance) {
    if (static_cast<int64_t>(pairs.size()) + ranks - distance > kMostPairs && distance > 1) break;
    for (int first = 0; first + distance < ranks; ++first)
      pairs.push_back({first, first + distance, 0, 0, true});
  }
  return pairs;
}

std::vector<PairTime> measure_pairs(const MpiSession& session, const PairWay& way, int64_t bytes,
                                    const std::function<void(const std::string& what)>& begins) {
  std::vector<PairTime> pairs = pairs_to_measure(session.ranks());
  std::vector<double> worst;  // three numbers a pair
  for (PairTime& pair : pairs) {
    wait_for_all(session);  // a pair has the network for itself
    if (session.rank() == pair.first || session.rank() == pair.second) {
      begins(text("halos between ranks ", pair.first, " and ", pair.second));
      const int peer = session.rank() == pair.first ? pair.second : pair.first;
      pair.latency_seconds = median_seconds(way, peer, kLatencyBytes, kLatencyTurns);
      way.poison();
      pair.seconds = median_seconds(way, peer, bytes, kTurns);
      pair.right = way.right(peer, bytes);
      begins("halos between other ranks");
    }
    worst.insert(worst.end(), {pair.seconds, pair.latency_seconds, pair.right ? 0.0 : 1.0});
  }
  if (worst.empty()) return pairs;
  const Waiting waiting("the times of all pairs");
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, worst.data(), static_cast<int>(worst.size()), MPI_DOUBLE, MPI_MAX,
                          session.comm()),
            "MPI_Allreduce");
  for (size_t i = 0; i < pairs.size(); ++i)
    pairs[i] = {pairs[i].first, pairs[i].second, worst[3 * i], worst[3 * i + 1], worst[3 * i + 2] == 0};
  return pairs;
}

std::vector<Finding> pair_findings(const std::vector<PairTime>& pairs, const std::vector<std::string>& hosts,
                                   const std::string& transport, int64_t bytes, double least_gb_per_second) {
  if (pairs.empty())
    return {
        {"halo bandwidth", Scope::kJob, "", "one rank: there are no halos", "", Verdict::kSkipped, "", {}}};
  std::vector<Finding> rows;
  std::vector<const PairTime*> within, between;
  for (const PairTime& pair : pairs) {
    const bool same = hosts[static_cast<size_t>(pair.first)] == hosts[static_cast<size_t>(pair.second)];
    (same ? within : between).push_back(&pair);
    if (!pair.right)
      rows.push_back(
          {"halo contents",
           Scope::kJob,
           "",
           text("damaged between ", name_of_pair(pair, hosts)),
           "what was sent",
           Verdict::kFail,
           "try another transport (run.transport), and leave these hosts out until it is understood",
           {}});
  }
  if (!within.empty())
    rows.push_back(judged("within a host", within, hosts, transport, bytes, least_gb_per_second));
  if (!between.empty())
    rows.push_back(judged("between hosts", between, hosts, transport, bytes, least_gb_per_second));
  return rows;
}

nlohmann::json json_of(const std::vector<PairTime>& pairs, int ranks, const std::string& transport,
                       int64_t bytes) {
  const std::vector<nlohmann::json> empty_row(static_cast<size_t>(ranks), nullptr);
  std::vector<std::vector<nlohmann::json>> rates(static_cast<size_t>(ranks), empty_row), latencies = rates;
  for (const PairTime& pair : pairs) {
    const auto a = static_cast<size_t>(pair.first), b = static_cast<size_t>(pair.second);
    rates[a][b] = rates[b][a] = gb_per_second(pair, bytes);
    latencies[a][b] = latencies[b][a] = pair.latency_seconds;
  }
  return {
      {"transport", transport}, {"bytes", bytes}, {"gb_per_second", rates}, {"latency_seconds", latencies}};
}

std::string matrix_text(const std::vector<PairTime>& pairs, int ranks, int64_t bytes) {
  const int printed = std::min(ranks, kMostPrinted);
  if (printed < 2) return "";
  const nlohmann::json json = json_of(pairs, ranks, "", bytes);
  std::ostringstream out;
  out << "       ";
  for (int column = 0; column < printed; ++column)
    out << std::setw(9) << column;
  out << '\n';
  for (int row = 0; row < printed; ++row) {
    out << std::setw(7) << row;
    for (int column = 0; column < printed; ++column) {
      const auto r = static_cast<size_t>(row), c = static_cast<size_t>(column);
      const nlohmann::json& cell = (column > row ? json["gb_per_second"] : json["latency_seconds"])[r][c];
      out << std::setw(9) << (cell.is_null() ? "-" : shown(cell.get<double>() * (column > row ? 1 : 1e6)));
    }
    out << '\n';
  }
  if (printed < ranks)
    out << "       (the first " << printed << " of " << ranks << " ranks; --json has all)\n";
  return out.str();
}

}  // namespace longhalo

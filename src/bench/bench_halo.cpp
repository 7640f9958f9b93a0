#include "bench/bench_halo.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>

#include "bench/bench.hpp"
#include "bench/timed_runs.hpp"
#include "comm/message_parts.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "device/available_memory.hpp"
#include "device/host_buffer.hpp"

namespace longhalo {
namespace {

constexpr int64_t kDefaultBytes = int64_t{256} << 20;
constexpr int64_t kLeastBytes = 8;
constexpr int64_t kGrowth = 4;
constexpr double kSampleSeconds = 2e-3;
constexpr int64_t kMostTurns = 1000;

// Sizes up to `most`, which is among them.
std::vector<int64_t> message_sizes(int64_t most) {
  std::vector<int64_t> sizes;
  for (int64_t bytes = kLeastBytes; bytes < most; bytes *= kGrowth)
    sizes.push_back(bytes);
  sizes.push_back(most);
  return sizes;
}

// Seconds of one exchange, of the slowest rank.
double seconds_of(const MpiSession& session, const HaloWay& way, int64_t bytes, int64_t turns) {
  wait_for_all(session);
  const Stopwatch watch;
  way.exchange(bytes, turns);
  return spread_over_ranks(session, watch.seconds()).max / static_cast<double>(turns);
}

}  // namespace

HaloTurn halo_turn(const MpiSession& session, int64_t turn) {
  const int left = session.rank() - 1;
  const int right = session.rank() + 1 < session.ranks() ? session.rank() + 1 : -1;
  return turn % 2 == 0 ? HaloTurn{right, left} : HaloTurn{left, right};
}

int64_t halo_bytes(const Config::Bench& bench) {
  return bench.bytes > 0 ? bench.bytes : kDefaultBytes;
}

std::vector<uint8_t> halo_pattern(int rank, int64_t bytes) {
  std::mt19937_64 generator(static_cast<uint64_t>(rank) + 1);
  std::vector<uint8_t> pattern(static_cast<size_t>(bytes));
  for (size_t i = 0; i < pattern.size(); i += sizeof(uint64_t)) {
    const uint64_t word = generator();
    std::memcpy(pattern.data() + i, &word, std::min(sizeof word, pattern.size() - i));
  }
  return pattern;
}

BenchTable halo_table() {
  return BenchTable({{"transport", ""},
                     {"bytes", "B"},
                     {"median_seconds", "s"},
                     {"min_seconds", "s"},
                     {"gb_per_second", "GB/s"}});
}

void require_neighbours(const MpiSession& session) {
  session.together([&] {
    if (session.ranks() == 1)
      throw UserError("bench halo needs at least two ranks", "1 rank was started",
                      "start it by mpirun -np 2 or srun -n 2");
  });
}

void require_halo_memory(const MpiSession& session, const Config::Bench& bench) {
  // A rank's own message; of each neighbour, of whom those at the ends have one, what comes and what should.
  const int64_t messages = 5 * session.ranks() - 4;
  session.together([&] {
    require_host_memory(halo_bytes(bench) / session.ranks() * messages, session.local_ranks(),
                        text("bench.bytes ", halo_bytes(bench), " (--bytes)"));
  });
}

bool measure_halo(const MpiSession& session, const Config::Bench& bench, const HaloWay& way,
                  BenchTable& table) {
  bool right = true;
  for (const int64_t bytes : message_sizes(halo_bytes(bench))) {
    seconds_of(session, way, bytes, 2);                       // opens connections
    const double about = seconds_of(session, way, bytes, 4);  // the same on every rank
    const int64_t pairs =
        std::clamp(static_cast<int64_t>(kSampleSeconds / about / 2), int64_t{1}, kMostTurns / 2);
    const int64_t turns = 2 * pairs;
    way.poison();
    std::vector<double> samples;
    for (int64_t repeat = 0; repeat < bench.repeats; ++repeat)
      samples.push_back(seconds_of(session, way, bytes, turns));
    right = right && way.right(bytes);
    const TimedRuns time = summary_of(std::move(samples));
    table.add({way.transport, bytes, time.median_seconds, time.min_seconds,
               static_cast<double>(bytes) / time.median_seconds / 1e9});
  }
  return sum_over_ranks(session, right ? 0 : 1) == 0;
}

void run_bench_halo_cpu(const MpiSession& session, const Config& config) {
  require_neighbours(session);
  require_halo_memory(session, config.bench);
  const int64_t most = halo_bytes(config.bench);
  std::vector<uint8_t> sent;
  struct Side {
    HostBuffer<uint8_t> received;
    std::vector<uint8_t> wanted;
  };
  std::map<int, Side> sides;  // by neighbour
  session.together([&] {
    sent = halo_pattern(session.rank(), most);
    for (const int64_t turn : {0, 1})
      if (const int from = halo_turn(session, turn).from; from >= 0)
        sides[from] = {HostBuffer<uint8_t>(most, "the received message"), halo_pattern(from, most)};
  });
  const HaloWay way{
      "mpi, host memory",
      [&](int64_t bytes, int64_t turns) {
        const Waiting waiting("halos of neighbours");
        for (int64_t turn = 0; turn < turns; ++turn) {
          const HaloTurn peers = halo_turn(session, turn);
          std::vector<MPI_Request> requests;
          if (peers.from >= 0)
            for_each_message(sides[peers.from].received.data(), bytes, [&](uint8_t* part, int count) {
              check_mpi(
                  MPI_Irecv(part, count, MPI_BYTE, peers.from, 0, session.comm(), &requests.emplace_back()),
                  "MPI_Irecv");
            });
          if (peers.to >= 0)
            for_each_message(sent.data(), bytes, [&](const uint8_t* part, int count) {
              check_mpi(
                  MPI_Isend(part, count, MPI_BYTE, peers.to, 0, session.comm(), &requests.emplace_back()),
                  "MPI_Isend");
            });
          check_mpi(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE),
                    "MPI_Waitall");
        }
      },
      [&] {
        for (auto& [from, side] : sides)
          std::memset(side.received.data(), 0xff, static_cast<size_t>(most));
      },
      [&](int64_t bytes) {
        return std::all_of(sides.begin(), sides.end(), [&](const auto& one) {
          return std::memcmp(one.second.received.data(), one.second.wanted.data(),
                             static_cast<size_t>(bytes)) == 0;
        });
      }};
  BenchTable table = halo_table();
  const bool right = measure_halo(session, config.bench, way, table);

  BenchReport report("halo exchange, CPU");
  report.add("ranks", session.ranks());
  report.add("repeats", config.bench.repeats, "", "median of these; slowest rank");
  report.add_table("messages", table,
                   "to a neighbour and from the other, all ranks at once, right and left in turn");
  report.publish(session, config.bench.json);
  session.together([&] { check(right, "the messages that were timed arrived as they were sent"); });
}

}  // namespace longhalo

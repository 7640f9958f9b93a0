// `longhalo bench copy` on the CPU: memory to memory, by one thread and by all of the rank.
#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "app/model_setup.hpp"
#include "bench/bench.hpp"
#include "bench/bench_report.hpp"
#include "bench/timed_runs.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "device/available_memory.hpp"
#include "device/host_buffer.hpp"

namespace longhalo {
namespace {

constexpr int64_t kDefaultBytes = int64_t{512} << 20;

void copy_by_threads(int threads, uint8_t* to, const uint8_t* from, int64_t bytes) {
  const int64_t part = (bytes + threads - 1) / threads;
  std::vector<std::jthread> workers;
  for (int64_t begin = part; begin < bytes; begin += part) {
    workers.emplace_back(
        [=] { std::memcpy(to + begin, from + begin, static_cast<size_t>(std::min(part, bytes - begin))); });
  }
  std::memcpy(to, from, static_cast<size_t>(std::min(part, bytes)));
}

}  // namespace

void run_bench_copy_cpu(const MpiSession& session, const Config& config) {
  const int threads = use_threads(session, config);
  const int64_t bytes = config.bench.bytes > 0 ? config.bench.bytes : kDefaultBytes;
  HostBuffer<uint8_t> from, to;
  session.together([&] {
    require_host_memory(2 * bytes, session.local_ranks(), text("bench.bytes ", bytes, " (--bytes)"));
  });
  session.together([&] {  // once all have asked what there is
    from = HostBuffer<uint8_t>(bytes, "the source of the copy");
    to = HostBuffer<uint8_t>(bytes, "the target of the copy");
  });
  std::mt19937_64 generator(static_cast<uint64_t>(session.rank()) + 1);
  for (int64_t i = 0; i < bytes; i += 8) {
    const uint64_t word = generator();
    std::memcpy(from.data() + i, &word, static_cast<size_t>(std::min<int64_t>(8, bytes - i)));
  }

  BenchReport report("memory copy, CPU");
  report.add("ranks", session.ranks(), "", "each copies at the same time");
  report.add("threads_per_rank", threads);
  report.add("repeats", config.bench.repeats, "", "median of these");
  BenchTable table({{"copy", ""},
                    {"threads", ""},
                    {"bytes_moved", "B"},
                    {"median_seconds", "s"},
                    {"min_seconds", "s"},
                    {"gb_per_second", "GB/s"}});
  bool right = true;
  std::vector<int> counts{1};
  if (threads > 1) counts.push_back(threads);
  for (const int count : counts) {
    const auto clear = [&] { std::memset(to.data(), 0xff, static_cast<size_t>(bytes)); };
    const TimedRuns time = time_on_cpu(session, config.bench.repeats, clear,
                                       [&] { copy_by_threads(count, to.data(), from.data(), bytes); });
    right = right && std::memcmp(to.data(), from.data(), static_cast<size_t>(bytes)) == 0;
    const double median = spread_over_ranks(session, time.median_seconds).mean;
    table.add({"host to host", count, 2 * bytes, median, spread_over_ranks(session, time.min_seconds).min,
               2 * static_cast<double>(bytes) / median / 1e9});
  }
  report.add_table("copies", table, "bytes read and written; a rank, mean over ranks");
  report.publish(session, config.bench.json);
  session.together([&] { check(right, "the memory that was copied is the same"); });
}

}  // namespace longhalo

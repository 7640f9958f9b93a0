// `longhalo bench copy` on a GPU: within its memory, from pinned host memory and back, and both at once.
#include <algorithm>
#include <functional>

#include "app/device_setup.hpp"
#include "bench/bench.hpp"
#include "bench/bench_report.hpp"
#include "bench/device_timer.hpp"
#include "core/error.hpp"
#include "device/device_buffer.hpp"
#include "device/pinned_buffer.hpp"
#include "kernels/random/fill_normal.hpp"

namespace longhalo {
namespace {

constexpr int64_t kDefaultBytes = int64_t{4} << 30;
constexpr int64_t kMostPinnedBytes = int64_t{1} << 30;  // pinning more takes long, and is no faster

struct Arrays {
  DeviceBuffer<BFloat16> from, to;
  PinnedBuffer<BFloat16> pinned_from, pinned_to;
};

// The same bits in a sample of blocks, the last one among them?
bool same_blocks(const BFloat16* a, const BFloat16* b, int64_t count, cudaStream_t stream) {
  constexpr int64_t kBlock = 4096, kBlocks = 64;
  for (int64_t i = 0; i <= kBlocks; ++i) {
    const int64_t size = std::min(kBlock, count);
    const int64_t at = (count - size) * i / kBlocks;
    std::vector<BFloat16> left(static_cast<size_t>(size)), right(static_cast<size_t>(size));
    to_host<BFloat16>(left, a + at, stream);
    to_host<BFloat16>(right, b + at, stream);
    if (!std::equal(left.begin(), left.end(), right.begin(),
                    [](BFloat16 x, BFloat16 y) { return x.bits == y.bits; }))
      return false;
  }
  return true;
}

}  // namespace

void run_bench_copy_cuda(const MpiSession& session, const Config& config) {
  const std::unique_ptr<Device> device = open_gpu(session, config);
  cudaStream_t stream = device->compute(), back = device->copy();
  const int64_t bytes = config.bench.bytes > 0 ? config.bench.bytes : kDefaultBytes;
  constexpr auto kSize = static_cast<int64_t>(sizeof(BFloat16));
  const int64_t count = std::max<int64_t>(1, bytes / kSize);
  const int64_t pinned = std::min(count, kMostPinnedBytes / kSize);
  Arrays arrays;
  session.together([&] {
    arrays.from = DeviceBuffer<BFloat16>(count, "the source of the copy", stream);
    arrays.to = DeviceBuffer<BFloat16>(count, "the target of the copy", stream);
    arrays.pinned_from = PinnedBuffer<BFloat16>(pinned, "the source of the copy");
    arrays.pinned_to = PinnedBuffer<BFloat16>(pinned, "the target of the copy");
  });
  fill_normal(stream, count, static_cast<uint64_t>(session.rank()), 0, 1, arrays.from.data());
  fill_normal(stream, pinned, static_cast<uint64_t>(session.rank()), 1, 1, arrays.to.data());
  to_host<BFloat16>(arrays.pinned_from.span(), arrays.to.data(), stream);

  // Both directions at once: the second one on the copy stream, joined by events.
  Event begun, done;
  const auto both = [&](int64_t) {
    begun.record(stream);
    begun.make_wait(back);
    copy_async(arrays.to.data(), arrays.pinned_from.data(), pinned, stream);
    copy_async(arrays.pinned_to.data(), arrays.from.data(), pinned, back);
    done.record(back);
    done.make_wait(stream);
  };
  struct Kind {
    const char* name;
    int64_t bytes_moved;  // as counted by the rate
    std::function<void(int64_t)> copy;
    std::function<bool()> right;
  };
  const auto arrived = [&] {
    return same_blocks(arrays.to.data(), arrays.pinned_from.data(), pinned, stream);
  };
  const auto returned = [&] {
    return same_blocks(arrays.pinned_to.data(), arrays.from.data(), pinned, stream);
  };
  const std::vector<Kind> kinds{
      {"device to device", 2 * count * kSize,
       [&](int64_t) { copy_async(arrays.to.data(), arrays.from.data(), count, stream); },
       [&] { return same_blocks(arrays.to.data(), arrays.from.data(), count, stream); }},
      {"host to device, pinned", pinned * kSize,
       [&](int64_t) { copy_async(arrays.to.data(), arrays.pinned_from.data(), pinned, stream); }, arrived},
      {"device to host, pinned", pinned * kSize,
       [&](int64_t) { copy_async(arrays.pinned_to.data(), arrays.from.data(), pinned, stream); }, returned},
      {"both ways at once, pinned", 2 * pinned * kSize, both, [&] { return arrived() && returned(); }},
  };

  BenchReport report("memory copy, CUDA");
  report.add("device", device->info().name);
  report.add("ranks", session.ranks(), "", "each copies at the same time");
  report.add("repeats", config.bench.repeats, "", "median of these");
  BenchTable table({{"copy", ""},
                    {"bytes_moved", "B"},
                    {"median_seconds", "s"},
                    {"min_seconds", "s"},
                    {"gb_per_second", "GB/s"}});
  bool right = true;
  for (const Kind& kind : kinds) {
    check_cuda(cudaMemsetAsync(arrays.to.data(), 0xff, static_cast<size_t>(arrays.to.bytes()), stream),
               "poisoning");
    std::fill(arrays.pinned_to.span().begin(), arrays.pinned_to.span().end(), BFloat16{0xffff});
    device->synchronize();
    wait_for_all(session);
    const TimedRuns time = time_on_device(stream, config.bench.repeats, kind.copy);
    right = right && kind.right();
    const double median = spread_over_ranks(session, time.median_seconds).mean;
    table.add({kind.name, kind.bytes_moved, median, spread_over_ranks(session, time.min_seconds).min,
               static_cast<double>(kind.bytes_moved) / median / 1e9});
  }
  report.add_table("copies", table, "device to device counts bytes read and written; a GPU, mean over ranks");
  report.publish(session, config.bench.json);
  session.together([&] { check(right, "the memory that was copied is the same"); });
}

}  // namespace longhalo

// `longhalo bench halo` between GPUs: each transport that works here, or the one that run.transport names.
#include <algorithm>
#include <map>

#include "app/device_setup.hpp"
#include "bench/bench.hpp"
#include "bench/bench_halo.hpp"
#include "comm/transport.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "device/device_buffer.hpp"

namespace longhalo {
namespace {

// Device memory of one rank: what it sends, and where its neighbours' messages arrive.
class Neighbours {
 public:
  Neighbours(const MpiSession& session, Device& device, int64_t most)
      : session_(session),
        stream_(device.communication()),
        sent_(to_device<uint8_t>(halo_pattern(session.rank(), most), "the sent message", stream_)) {
    for (const int64_t turn : {0, 1})
      if (const int from = halo_turn(session, turn).from; from >= 0)
        sides_[from] = {DeviceBuffer<uint8_t>(most, "the received message", stream_),
                        halo_pattern(from, most)};
  }

  HaloWay way(Transport& transport) {
    return {std::string(transport.name()),
            [this, &transport](int64_t bytes, int64_t turns) { exchange(transport, bytes, turns); },
            [this] {
              for (auto& [from, side] : sides_)
                check_cuda(cudaMemsetAsync(side.received.data(), 0xff,
                                           static_cast<size_t>(side.received.bytes()), stream_),
                           "poisoning");
            },
            [this](int64_t bytes) {
              return std::all_of(sides_.begin(), sides_.end(),
                                 [&](const auto& one) { return arrived(one.second, bytes); });
            }};
  }

 private:
  struct Side {
    DeviceBuffer<uint8_t> received;
    std::vector<uint8_t> wanted;
  };

  void exchange(Transport& transport, int64_t bytes, int64_t turns) {
    for (int64_t turn = 0; turn < turns; ++turn) {
      const HaloTurn peers = halo_turn(session_, turn);
      std::vector<DeviceMessage> sends, receives;
      if (peers.to >= 0) sends.push_back({peers.to, sent_.data(), bytes});
      if (peers.from >= 0) receives.push_back({peers.from, sides_[peers.from].received.data(), bytes});
      transport.exchange(sends, receives, stream_);
    }
    check_cuda(cudaStreamSynchronize(stream_), "waiting for messages");
    transport.check_health();
  }

  bool arrived(const Side& side, int64_t bytes) const {
    std::vector<uint8_t> found(static_cast<size_t>(bytes));
    to_host<uint8_t>(found, side.received.data(), stream_);
    return std::equal(found.begin(), found.end(), side.wanted.begin());
  }

  const MpiSession& session_;
  cudaStream_t stream_;
  DeviceBuffer<uint8_t> sent_;
  std::map<int, Side> sides_;  // by neighbour
};

// The first line of a refusal.
std::string reason_of(const std::exception& error) {
  const std::string words = error.what();
  return words.substr(0, words.find('\n'));
}

}  // namespace

void run_bench_halo_cuda(const MpiSession& session, const Config& config) {
  require_neighbours(session);
  require_halo_memory(session, config.bench);
  const std::unique_ptr<Device> device = open_gpu(session, config);
  std::unique_ptr<Neighbours> neighbours;
  session.together(
      [&] { neighbours = std::make_unique<Neighbours>(session, *device, halo_bytes(config.bench)); });

  BenchReport report("halo exchange, CUDA");
  report.add("device", device->info().name);
  report.add("ranks", session.ranks());
  report.add("repeats", config.bench.repeats, "", "median of these; slowest rank");
  BenchTable table = halo_table();
  bool right = true;
  const auto measure = [&](TransportChoice choice) {
    const ChosenTransport chosen = make_transport(session, choice, device->info());
    right = measure_halo(session, config.bench, neighbours->way(*chosen.transport), table) && right;
  };
  if (transport_choice(config) != TransportChoice::kAuto) {
    measure(transport_choice(config));
  } else {
    for (const TransportChoice choice :
         {TransportChoice::kNccl, TransportChoice::kMpi, TransportChoice::kStaged}) {
      try {  // a transport that cannot be used is refused on every rank
        measure(choice);
      } catch (const UserError& error) {
        report.add(text("no_", name_of(choice)), reason_of(error), "", "cannot be used here");
      }
    }
  }
  report.add_table("messages", table,
                   "to a neighbour and from the other, all ranks at once, right and left in turn");
  report.publish(session, config.bench.json);
  session.together([&] { check(right, "the messages that were timed arrived as they were sent"); });
}

}  // namespace longhalo

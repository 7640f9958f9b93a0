// `longhalo bench halo` between GPUs: each transport that works here, or the one that run.transport names.
#include <algorithm>
#include <cstring>

#include "app/bench.hpp"
#include "app/bench_halo.hpp"
#include "app/device_setup.hpp"
#include "comm/transport.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "device/device_buffer.hpp"

namespace longhalo {
namespace {

// Device memory of one rank: what it sends, and where the left neighbour's message arrives.
class Neighbours {
 public:
  Neighbours(const MpiSession& session, Device& device, int64_t most)
      : rank_(session.rank()),
        has_left_(rank_ > 0),
        has_right_(rank_ + 1 < session.ranks()),
        stream_(device.communication()),
        sent_(to_device<uint8_t>(halo_pattern(rank_, most), "the sent message", stream_)),
        received_(most, "the received message", stream_),
        wanted_(halo_pattern(rank_ - 1, most)) {}

  HaloWay way(Transport& transport) {
    return {std::string(transport.name()),
            [this, &transport](int64_t bytes, int64_t turns) {
              std::vector<DeviceMessage> sends, receives;
              if (has_right_) sends.push_back({rank_ + 1, sent_.data(), bytes});
              if (has_left_) receives.push_back({rank_ - 1, received_.data(), bytes});
              for (int64_t turn = 0; turn < turns; ++turn)
                transport.exchange(sends, receives, stream_);
              check_cuda(cudaStreamSynchronize(stream_), "waiting for messages");
              transport.check_health();
            },
            [this] {
              check_cuda(
                  cudaMemsetAsync(received_.data(), 0xff, static_cast<size_t>(received_.bytes()), stream_),
                  "poisoning");
            },
            [this](int64_t bytes) { return !has_left_ || arrived(bytes); }};
  }

 private:
  bool arrived(int64_t bytes) const {
    std::vector<uint8_t> found(static_cast<size_t>(bytes));
    to_host<uint8_t>(found, received_.data(), stream_);
    return std::equal(found.begin(), found.end(), wanted_.begin());
  }

  int rank_;
  bool has_left_, has_right_;
  cudaStream_t stream_;
  DeviceBuffer<uint8_t> sent_, received_;
  std::vector<uint8_t> wanted_;
};

// The first line of a refusal.
std::string reason_of(const std::exception& error) {
  const std::string words = error.what();
  return words.substr(0, words.find('\n'));
}

}  // namespace

void run_bench_halo_cuda(const MpiSession& session, const Config& config) {
  require_neighbours(session);
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
  report.add_table("messages", table, "one to the right neighbour and one from the left, all ranks at once");
  report.publish(session, config.bench.json);
  session.together([&] { check(right, "the messages that were timed arrived as they were sent"); });
}

}  // namespace longhalo

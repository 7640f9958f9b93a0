// The doctor between GPUs: which transports work, and messages over the one that the job would use.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <memory>

#include "app/device_setup.hpp"
#include "bench/bench_halo.hpp"
#include "bench/gpu_rates.hpp"
#include "comm/transport.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "device/available_memory.hpp"
#include "device/cuda_check.hpp"
#include "device/device_buffer.hpp"
#include "doctor/doctor_device.hpp"

namespace longhalo {
namespace {

std::string version_text(int version) {
  return text(version / 1000, ".", version % 1000 / 10);
}

std::vector<Fact> gpu_facts(const DeviceInfo& info) {
  int runtime = 0, driver = 0;
  check_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  return {{"versions", "cuda", version_text(runtime), Verdict::kFail},
          {"GPU driver and model", "model", info.name, Verdict::kWarn},
          {"GPU driver and model", "driver for CUDA", version_text(driver), Verdict::kWarn}};
}

// Whether the driver shares GPU memory as dma-buf; only its own interface says so.
std::optional<bool> shares_dma_buf(int index) {
  constexpr int kDmaBufSupported = 124;  // CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
  using GetDevice = int(int*, int);
  using GetAttribute = int(int*, int, int);
  void* driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // loaded already: CUDA runs
  if (driver == nullptr) return std::nullopt;
  auto* const get_device = reinterpret_cast<GetDevice*>(::dlsym(driver, "cuDeviceGet"));
  auto* const get_attribute = reinterpret_cast<GetAttribute*>(::dlsym(driver, "cuDeviceGetAttribute"));
  int device = 0, value = 0;
  const bool known = get_device != nullptr && get_attribute != nullptr && get_device(&device, index) == 0 &&
                     get_attribute(&value, kDmaBufSupported, device) == 0;
  ::dlclose(driver);
  return known ? std::optional<bool>(value != 0) : std::nullopt;
}

// Collective.
std::vector<std::string> gpus_of_host(const MpiSession& session, const std::string& uuid) {
  constexpr size_t kLength = 64;
  std::array<char, kLength> own{};
  uuid.copy(own.data(), kLength - 1);
  std::vector<char> all(kLength * static_cast<size_t>(session.ranks()));
  const Waiting waiting("the GPUs of all ranks");
  check_mpi(MPI_Allgather(own.data(), kLength, MPI_CHAR, all.data(), kLength, MPI_CHAR, session.comm()),
            "MPI_Allgather");
  const std::vector<std::string> hosts = session.hosts();
  std::vector<std::string> gpus;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const std::string name = all.data() + rank * kLength;
    if (hosts[rank] == session.host() && std::find(gpus.begin(), gpus.end(), name) == gpus.end())
      gpus.push_back(name);
  }
  return gpus;
}

// What messages between this rank's GPU and another one need, and keep alive.
struct GpuLink {
  std::shared_ptr<Device> device;
  DeviceBuffer<uint8_t> sent, received;
  std::unique_ptr<Transport> transport;  // goes before the memory that it uses
  cudaStream_t stream = nullptr;

  void exchange(int peer, int64_t bytes, int64_t turns) {
    for (int64_t turn = 0; turn < turns; ++turn) {
      const DeviceMessage send{peer, sent.data(), bytes}, receive{peer, received.data(), bytes};
      transport->exchange({&send, 1}, {&receive, 1}, stream);
    }
    check_cuda(cudaStreamSynchronize(stream), "waiting for messages");
    transport->check_health();
  }
  void poison() {
    check_cuda(cudaMemsetAsync(received.data(), 0xff, static_cast<size_t>(received.bytes()), stream),
               "poisoning");
    check_cuda(cudaStreamSynchronize(stream), "poisoning");
  }
  bool right(int peer, int64_t bytes) const {
    std::vector<uint8_t> found(static_cast<size_t>(bytes));
    to_host<uint8_t>(found, received.data(), stream);
    return found == halo_pattern(peer, bytes);
  }
};

PairWay way_of(const std::shared_ptr<GpuLink>& link) {
  return {std::string(link->transport->name()),
          [link](int peer, int64_t bytes, int64_t turns) { link->exchange(peer, bytes, turns); },
          [link] { link->poison(); }, [link](int peer, int64_t bytes) { return link->right(peer, bytes); }};
}

Finding transport_row(TransportChoice choice, std::string found, Verdict verdict,
                      const std::string& remedy = "") {
  return {"transport", Scope::kJob, std::string(name_of(choice)), std::move(found), "", verdict, remedy, {}};
}

// Tries every transport, so that the report says what each would do, and keeps the one that the job would
// use.
std::unique_ptr<Transport> choose(const MpiSession& session, TransportChoice wanted, const DeviceInfo& info,
                                  std::vector<Finding>& findings) {
  std::unique_ptr<Transport> chosen;
  std::string before;  // why those before the chosen one cannot be used
  for (const TransportChoice choice :
       {TransportChoice::kNccl, TransportChoice::kMpi, TransportChoice::kStaged}) {
    const bool may_be_chosen = wanted == choice || (wanted == TransportChoice::kAuto && chosen == nullptr);
    try {
      ChosenTransport made = make_transport(session, choice, info);
      if (!may_be_chosen) {
        findings.push_back(transport_row(choice, "works, is not used", Verdict::kPass));
        continue;
      }
      chosen = std::move(made.transport);
      const bool slow = choice == TransportChoice::kStaged && wanted == TransportChoice::kAuto;
      findings.push_back(transport_row(
          choice, slow ? text("carries the halos through host memory, since ", before) : "carries the halos",
          slow ? Verdict::kWarn : Verdict::kPass,
          slow ? "make NCCL work: a GPU of its own for every rank, and a build with NCCL" : ""));
    } catch (const UserError& error) {  // refused on every rank
      const Finding refused = failed_check("transport", Scope::kJob, error);
      before += text(before.empty() ? "" : "; ", refused.found);
      findings.push_back(transport_row(choice, refused.found,
                                       wanted == choice ? Verdict::kFail : Verdict::kSkipped,
                                       wanted == choice ? refused.remedy : ""));
    }
  }
  return chosen;
}

std::optional<PairWay> connect_gpus(const MpiSession& session, const Config& config,
                                    const std::shared_ptr<Device>& device, std::vector<Finding>& findings) {
  if (session.ranks() == 1) return std::nullopt;
  std::vector<Finding> found;
  const auto link = std::make_shared<GpuLink>();
  link->device = device;
  link->stream = device->communication();
  link->transport = choose(session, transport_choice(config), device->info(), found);
  if (link->transport == nullptr)
    found.push_back({"transport",
                     Scope::kJob,
                     "",
                     "none carries the halos",
                     "one that works",
                     Verdict::kFail,
                     "see why each of them cannot be used, above",
                     {}});
  if (session.is_root()) findings.insert(findings.end(), found.begin(), found.end());
  if (link->transport == nullptr) return std::nullopt;
  const int64_t bytes = config.doctor.halo_bytes;
  session.together(
      [&] { require_host_memory(2 * bytes, session.local_ranks(), text("doctor.halo_bytes ", bytes)); });
  session.together([&] {  // once all have asked what there is
    link->sent = to_device<uint8_t>(halo_pattern(session.rank(), bytes), "the sent message", link->stream);
    link->received = DeviceBuffer<uint8_t>(bytes, "the received message", link->stream);
  });
  return way_of(link);
}

}  // namespace

void open_doctor_gpu(const MpiSession& session, const Config& config, DoctorDevice& device) {
  const std::shared_ptr<Device> gpu = open_gpu(session, config);
  const DeviceInfo& info = gpu->info();
  device.is_gpu = true;
  session.together([&] { device.facts = gpu_facts(info); });
  device.findings.push_back({"device",
                             Scope::kRank,
                             "",
                             info.name,
                             "",
                             Verdict::kPass,
                             "",
                             {{"index", info.index}, {"uuid", info.uuid}}});
  device.host_gpus = gpus_of_host(session, info.uuid);
  device.dma_buf = shares_dma_buf(info.index);
  device.matrix_flops = [gpu] { return measure_gpu_rates(*gpu).matmul_flops; };
  device.connect = [&session, &config, gpu](std::vector<Finding>& findings) {
    return connect_gpus(session, config, gpu, findings);
  };
}

}  // namespace longhalo

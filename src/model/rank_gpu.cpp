#include "model/rank_gpu.hpp"

#include "comm/device_choice.hpp"
#include "core/text.hpp"
#include "device/memory_pool.hpp"

namespace longhalo {

RankGpu::RankGpu(const MpiSession& session, std::unique_ptr<Device> device, TransportChoice transport)
    : session_(session),
      device_(std::move(device)),
      sharing_(ranks_on_card(session, device_->info().uuid)),
      transport_(make_transport(session, transport, device_->info())) {
  session.together([&] { matmul_ = std::make_unique<DeviceMatmul>(device_->compute()); });
}

void RankGpu::choose_products_alike() {
  matmul_.reset();
  matmul_ = std::make_unique<DeviceMatmul>(compute(), kMatmulWorkspaceBytes, MatmulTuning::kHeuristic);
}

std::string RankGpu::name() const {
  return text(device_->info().name, " ", device_->info().index, sharing_ > 1 ? " (shared)" : "");
}

std::string RankGpu::memory_place() const {
  return text("GPU ", device_->info().index, " (", device_->info().name, ") of host ", session_.host());
}

DeviceMemoryUse RankGpu::memory_use() const {
  const PoolUse use = memory_pool().use();
  return {use.used_high_bytes, use.reserved_high_bytes, use.fragmentation()};
}

}  // namespace longhalo

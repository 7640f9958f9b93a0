// GPUDirect RDMA: can network adapters of this host reach GPU memory without a copy through host memory? It
// takes the module nvidia_peermem or a kernel and driver that share memory as dma-buf; where neither is there
// nothing fails, halos between hosts only take ten times as long.
#pragma once

#include <filesystem>
#include <optional>

#include "doctor/doctor_report.hpp"

namespace longhalo {

struct RdmaState {
  bool peer_module = false;     // nvidia_peermem, or nv_peer_mem before it
  bool has_adapter = false;     // InfiniBand or RoCE
  std::optional<bool> dma_buf;  // as the GPU's driver says; empty where it was not asked
};
RdmaState read_rdma(const std::filesystem::path& sysfs, std::optional<bool> dma_buf);

/// Pure.
Finding rdma_finding(const RdmaState& state, bool gpus_are_used, bool several_hosts);

/// What MPI says of itself; a row, since a transport over device pointers needs it. `gpus_are_used` decides
/// whether that matters.
Finding mpi_cuda_finding(bool gpus_are_used);

}  // namespace longhalo

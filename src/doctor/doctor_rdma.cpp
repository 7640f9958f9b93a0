#include "doctor/doctor_rdma.hpp"

#include <mpi.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <initializer_list>

namespace longhalo {
namespace fs = std::filesystem;
namespace {

// 1 yes, 0 no, empty: this MPI cannot say.
std::optional<bool> mpi_knows_cuda() {
#ifdef MPIX_CUDA_AWARE_SUPPORT
  return MPIX_Query_cuda_support() == 1;
#else
  return std::nullopt;
#endif
}

}  // namespace

RdmaState read_rdma(const fs::path& sysfs, std::optional<bool> dma_buf) {
  RdmaState state;
  std::error_code ignored;
  for (const char* module : {"nvidia_peermem", "nv_peer_mem"})
    state.peer_module = state.peer_module || fs::exists(sysfs / "module" / module, ignored);
  const fs::path adapters = sysfs / "class" / "infiniband";
  state.has_adapter = fs::is_directory(adapters, ignored) && !fs::is_empty(adapters, ignored);
  state.dma_buf = dma_buf;
  return state;
}

Finding rdma_finding(const RdmaState& state, bool gpus_are_used, bool several_hosts) {
  Finding row{"GPUDirect RDMA", Scope::kHost, "", "", "nvidia_peermem or dma-buf", Verdict::kPass, "", {}};
  row.values = {{"nvidia_peermem", state.peer_module}, {"adapter", state.has_adapter}};
  row.values["dma_buf"] = state.dma_buf ? nlohmann::json(*state.dma_buf) : nlohmann::json();
  if (!gpus_are_used) {
    row.found = "not needed: the job uses no GPU";
    row.verdict = Verdict::kSkipped;
  } else if (state.peer_module) {
    row.found = "by the module nvidia_peermem";
  } else if (state.dma_buf.value_or(false)) {
    row.found = "by dma-buf";
  } else if (!several_hosts) {
    row.found = "none, and not needed on one host";
    row.verdict = Verdict::kSkipped;
  } else {
    row.found = state.has_adapter ? "none: halos between hosts are copied through host memory"
                                  : "none, and no InfiniBand or RoCE adapter: halos between hosts go by TCP";
    row.verdict = Verdict::kWarn;
    row.remedy = state.has_adapter
                     ? "modprobe nvidia_peermem on this host, or use the open kernel modules (dma-buf)"
                     : "ask for nodes with adapters, or expect what the halo bandwidth below shows";
  }
  return row;
}

Finding mpi_cuda_finding(bool gpus_are_used) {
  const std::optional<bool> knows = mpi_knows_cuda();
  Finding row{"CUDA in MPI", Scope::kRank, "", "", "", Verdict::kPass, "", {}};
  row.found = !knows   ? "this MPI cannot say; device pointers are not given to it"
              : *knows ? "yes, it says"
                       : "no; device pointers are not given to it";
  if (!gpus_are_used) row.verdict = Verdict::kSkipped;
  return row;
}

}  // namespace longhalo

// Which transport carries device memory between ranks: the choice alone, pure, without MPI or CUDA.
//
//   nccl    NVLink, PCIe or GPUDirect RDMA, as NCCL finds them; needs a GPU of its own for every rank
//   mpi     device pointers given to an MPI that is CUDA-aware
//   staged  through pinned host memory and any MPI; slowest, and possible nearly everywhere
#pragma once

#include <string>
#include <string_view>

namespace longhalo {

enum class TransportChoice { kAuto, kNccl, kMpi, kStaged };

std::string_view name_of(TransportChoice choice);

/// Why a transport cannot be used, in words that follow "nccl: "; empty where nothing speaks against it.
/// The same on every rank.
struct TransportObjections {
  std::string nccl, mpi, staged;
  std::string& of(TransportChoice choice);
  const std::string& of(TransportChoice choice) const;
};

/// The transport to use: `wanted` itself, or for kAuto the first of nccl, mpi, staged without an objection.
/// Throws UserError that names every objection and the remedy when there is none.
TransportChoice choose_transport(TransportChoice wanted, const TransportObjections& objections);

/// One sentence for the log: which transport runs, and why those that `kAuto` prefers to it do not.
std::string transport_reason(TransportChoice wanted, TransportChoice chosen,
                             const TransportObjections& objections);

}  // namespace longhalo

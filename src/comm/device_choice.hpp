// Which GPU a rank takes: the one of its number among the ranks of its node.
//
// Let every rank see all GPUs of its node: a launcher that binds one GPU to each rank works too, but keeps
// ranks of one node from reaching each other's memory directly.
#pragma once

#include <string>

#include "comm/mpi_session.hpp"

namespace longhalo {

enum class ShareGpus { kNo, kYes };

/// What one rank knows of its node.
struct NodeGpus {
  std::string host;
  int local_rank = 0, local_ranks = 1;
  int visible = 0;  // GPUs that this rank may use
  /// Every rank of the node sees one GPU, and no two see the same: the launcher has bound them.
  bool bound = false;
};

/// The index, among the visible ones, of the GPU to use. Throws UserError naming host, ranks, GPUs and the
/// remedy when there are fewer GPUs than ranks and they may not be shared. Pure.
int device_index(const NodeGpus& node, ShareGpus share);

/// The same for this rank. Collective: when a rank finds no GPU, every rank throws the same JointError.
/// Built with CUDA only.
int choose_device(const MpiSession& session, ShareGpus share);

/// Ranks, this one included, that compute on the card of this unique name (DeviceInfo::uuid). Collective.
int ranks_on_card(const MpiSession& session, const std::string& uuid);

}  // namespace longhalo

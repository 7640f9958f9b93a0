#include "comm/device_choice.hpp"

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {

int device_index(const NodeGpus& node, ShareGpus share) {
  check(node.local_rank >= 0 && node.local_rank < node.local_ranks, "a rank is one of its node's ranks");
  if (node.visible < 1)
    throw UserError("no GPU can be used", text("host ", node.host),
                    "check nvidia-smi and CUDA_VISIBLE_DEVICES there, or run with run.device: cpu");
  if (node.bound) return 0;
  if (node.local_ranks <= node.visible) return node.local_rank;
  if (share == ShareGpus::kYes) return node.local_rank % node.visible;
  throw UserError(text(node.local_ranks, " ranks would share ", node.visible, " GPU(s)"),
                  text("host ", node.host, ", rank ", node.local_rank, " of that node"),
                  text("start at most ", node.visible, " rank(s) a node (mpirun --map-by ppr:", node.visible,
                       ":node, srun --ntasks-per-node), or set run.share_gpus: true"));
}

}  // namespace longhalo

// Whether a folder is the same one on all hosts: checkpoints need that, and the first may be hours away.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "comm/mpi_session.hpp"

namespace longhalo {

struct SharedFolder {
  std::string fault, remedy;  // empty where the hosts of all ranks see what rank 0 makes
};

/// Rank 0 makes a file in `folder`, or where that will be made, and all look for it. The answer is rank 0's:
/// nothing on other ranks, nor where rank 0 cannot write there. Collective.
std::optional<SharedFolder> look_at_shared_folder(const MpiSession& session,
                                                  const std::filesystem::path& folder);

/// Of a folder that the job will make, the one that is there already. Stops at a file or a link that leads
/// nowhere, too: what is looked at has to be where the job will be.
std::filesystem::path nearest_existing(std::filesystem::path folder);

}  // namespace longhalo

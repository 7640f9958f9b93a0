// What every rank finds out for itself and has to find alike: a model's files, a token file. Copies on disks
// of the hosts' own may differ, and ranks that compute with different numbers do not notice: what comes out
// looks like results.
#pragma once

#include <string>
#include <string_view>

#include "comm/mpi_session.hpp"

namespace longhalo {

/// Throws the same JointError on all ranks, with `where` and `remedy`, unless `value` is rank 0's on every
/// rank: "<what> on this rank, <its value>, is not rank 0's, <that one>". Collective.
void require_alike(const MpiSession& session, std::string_view what, const std::string& value,
                   std::string_view where, std::string_view remedy);

}  // namespace longhalo

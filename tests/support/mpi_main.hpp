// The main of tests that run on several ranks. A test passes when it passes on every rank.
#pragma once

#include "comm/mpi_session.hpp"

namespace longhalo::test {

/// The session of this test program.
const MpiSession& session();

}  // namespace longhalo::test

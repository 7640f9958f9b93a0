// The main of tests that run on several ranks. A test passes when it passes on every rank.
#pragma once

#include <functional>
#include <vector>

#include "comm/mpi_session.hpp"

namespace longhalo::test {

/// The session of this test program.
const MpiSession& session();

/// What rank 0 makes, on every rank: expected values are computed once, not once a rank. Collective.
template <class T>
std::vector<T> made_by_root(const std::function<std::vector<T>()>& make) {
  std::vector<T> values;
  if (session().is_root()) values = make();
  values.resize(static_cast<size_t>(broadcast_count(session(), static_cast<int64_t>(values.size()))));
  broadcast_bytes(session(), values.data(), static_cast<int64_t>(values.size() * sizeof(T)), 0);
  return values;
}

}  // namespace longhalo::test

// Inside the transports: how each is tried. An attempt is collective and ends alike on all ranks: with a
// transport that has moved bytes between neighbours, or with the objection of the first rank that has one.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "comm/mpi_session.hpp"
#include "comm/transport.hpp"

namespace longhalo {

struct TransportAttempt {
  std::unique_ptr<Transport> transport;
  std::string objection;  // set where there is no transport
};

TransportAttempt try_nccl(const MpiSession& session, const DeviceInfo& device);
TransportAttempt try_mpi(const MpiSession& session);
TransportAttempt try_staged(const MpiSession& session);

/// Makes a transport by `make` (which must not wait for other ranks through MPI) and proves it by a message
/// to the next rank. Collective.
TransportAttempt prove(const MpiSession& session, const std::function<std::unique_ptr<Transport>()>& make);

/// The objection of the first rank that has one, with that rank's name; empty when no rank has any.
/// Collective.
std::string first_objection(const MpiSession& session, const std::string& own);

/// The first line of an error: the others say where in LongHalo, which is of no use in an objection.
std::string short_words(const std::exception& error);

}  // namespace longhalo

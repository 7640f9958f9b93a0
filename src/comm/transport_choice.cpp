#include "comm/transport_choice.hpp"

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr TransportChoice kByPreference[] = {TransportChoice::kNccl, TransportChoice::kMpi,
                                             TransportChoice::kStaged};

const char* remedy_of(TransportChoice kind) {
  switch (kind) {
    case TransportChoice::kNccl:
      return "give every rank a GPU of its own, build with NCCL, and let NCCL_DEBUG=WARN tell more; or set "
             "run.transport: auto";
    case TransportChoice::kMpi:
      return "use an MPI that is built with CUDA (ompi_info --parsable --all | grep mpi_built_with_cuda), or "
             "set "
             "run.transport: auto";
    case TransportChoice::kStaged:
      return "use an MPI that supports MPI_THREAD_MULTIPLE, or set run.transport: auto";
    case TransportChoice::kAuto:
      break;
  }
  return "give every rank a GPU of its own and build with NCCL, or use an MPI that supports "
         "MPI_THREAD_MULTIPLE";
}

}  // namespace

std::string_view name_of(TransportChoice kind) {
  switch (kind) {
    case TransportChoice::kNccl:
      return "nccl";
    case TransportChoice::kMpi:
      return "mpi";
    case TransportChoice::kStaged:
      return "staged";
    case TransportChoice::kAuto:
      break;
  }
  return "auto";
}

std::string& TransportObjections::of(TransportChoice kind) {
  check(kind != TransportChoice::kAuto, "auto is no transport of its own");
  return kind == TransportChoice::kNccl ? nccl : kind == TransportChoice::kMpi ? mpi : staged;
}

const std::string& TransportObjections::of(TransportChoice kind) const {
  return const_cast<TransportObjections*>(this)->of(kind);
}

TransportChoice choose_transport(TransportChoice wanted, const TransportObjections& objections) {
  if (wanted != TransportChoice::kAuto) {
    if (objections.of(wanted).empty()) return wanted;
    throw UserError(text("the transport ", name_of(wanted), " cannot be used"), objections.of(wanted),
                    remedy_of(wanted));
  }
  std::string all;
  for (const TransportChoice kind : kByPreference) {
    if (objections.of(kind).empty()) return kind;
    all += text(all.empty() ? "" : "; ", name_of(kind), ": ", objections.of(kind));
  }
  throw UserError("no transport can move GPU memory between the ranks", all, remedy_of(wanted));
}

std::string transport_reason(TransportChoice wanted, TransportChoice chosen,
                             const TransportObjections& objections) {
  if (wanted != TransportChoice::kAuto)
    return text("transport ", name_of(chosen), ", as run.transport asks for");
  std::string refused;
  for (const TransportChoice kind : kByPreference) {
    if (kind == chosen) break;
    refused += text(refused.empty() ? "; not " : "; nor ", name_of(kind), ": ", objections.of(kind));
  }
  return text("transport ", name_of(chosen), refused.empty() ? ", the fastest there is" : refused);
}

}  // namespace longhalo

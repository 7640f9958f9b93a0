#include "comm/transport_choice.hpp"

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr TransportKind kByPreference[] = {TransportKind::kNccl, TransportKind::kMpi, TransportKind::kStaged};

const char* remedy_of(TransportKind kind) {
  switch (kind) {
    case TransportKind::kNccl:
      return "give every rank a GPU of its own and build with NCCL, or set run.transport: auto";
    case TransportKind::kMpi:
      return "use an MPI that is built with CUDA (ompi_info --parsable --all | grep mpi_built_with_cuda), or "
             "set "
             "run.transport: auto";
    case TransportKind::kStaged:
      return "use an MPI that supports MPI_THREAD_MULTIPLE, or set run.transport: auto";
    case TransportKind::kAuto:
      break;
  }
  return "give every rank a GPU of its own and build with NCCL, or use an MPI that supports "
         "MPI_THREAD_MULTIPLE";
}

}  // namespace

std::string_view name_of(TransportKind kind) {
  switch (kind) {
    case TransportKind::kNccl:
      return "nccl";
    case TransportKind::kMpi:
      return "mpi";
    case TransportKind::kStaged:
      return "staged";
    case TransportKind::kAuto:
      break;
  }
  return "auto";
}

std::string& TransportObjections::of(TransportKind kind) {
  check(kind != TransportKind::kAuto, "auto is no transport of its own");
  return kind == TransportKind::kNccl ? nccl : kind == TransportKind::kMpi ? mpi : staged;
}

const std::string& TransportObjections::of(TransportKind kind) const {
  return const_cast<TransportObjections*>(this)->of(kind);
}

TransportKind choose_transport(TransportKind wanted, const TransportObjections& objections) {
  if (wanted != TransportKind::kAuto) {
    if (objections.of(wanted).empty()) return wanted;
    throw UserError(text("the transport ", name_of(wanted), " cannot be used"), objections.of(wanted),
                    remedy_of(wanted));
  }
  std::string all;
  for (const TransportKind kind : kByPreference) {
    if (objections.of(kind).empty()) return kind;
    all += text(all.empty() ? "" : "; ", name_of(kind), ": ", objections.of(kind));
  }
  throw UserError("no transport can move GPU memory between the ranks", all, remedy_of(wanted));
}

std::string transport_reason(TransportKind wanted, TransportKind chosen,
                             const TransportObjections& objections) {
  if (wanted != TransportKind::kAuto)
    return text("transport ", name_of(chosen), ", as run.transport asks for");
  std::string refused;
  for (const TransportKind kind : kByPreference) {
    if (kind == chosen) break;
    refused += text(refused.empty() ? "; not " : "; nor ", name_of(kind), ": ", objections.of(kind));
  }
  return text("transport ", name_of(chosen), refused.empty() ? ", the fastest there is" : refused);
}

}  // namespace longhalo

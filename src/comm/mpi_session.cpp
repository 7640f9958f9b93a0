#include "comm/mpi_session.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "comm/message_parts.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"

namespace longhalo {
namespace {

// Started without PMI, every task believes that it is rank 0 of 1: each would do the whole job again.
void refuse_disconnected_tasks(int ranks) {
  const char* tasks = std::getenv("SLURM_STEP_NUM_TASKS");
  const char* step = std::getenv("SLURM_STEP_ID");
  if (ranks == 1 && step != nullptr && tasks != nullptr && std::atoi(tasks) > 1)
    throw UserError(text("Slurm started ", tasks, " tasks but MPI sees a single rank"), "the launcher",
                    "start with `srun --mpi=pmix`, or with mpirun inside the allocation");
}

}  // namespace

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char words[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, words, &length);
  throw InvariantError(text(call, " failed: ", std::string(words, static_cast<size_t>(length))),
                       std::source_location::current());
}

MpiSession::MpiSession(int* argc, char*** argv) : owns_mpi_(true) {
  const Waiting waiting("the start of MPI");
  int provided = 0;
  check_mpi(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  join(MPI_COMM_WORLD);
  set_log_rank(rank_);
  refuse_disconnected_tasks(ranks_);
}

MpiSession::MpiSession(MPI_Comm parent) {
  const Waiting waiting("a session of its own");
  join(parent);
}

void MpiSession::join(MPI_Comm parent) {
  // Waiting: both constructors have one.
  check_mpi(MPI_Comm_dup(parent, &comm_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm_, &ranks_), "MPI_Comm_size");
  check_mpi(MPI_Query_thread(&thread_level_), "MPI_Query_thread");
  MPI_Comm node = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node),
            "MPI_Comm_split_type");
  check_mpi(MPI_Comm_rank(node, &local_rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(node, &local_ranks_), "MPI_Comm_size");
  MPI_Comm_free(&node);
  char name[MPI_MAX_PROCESSOR_NAME];
  int length = 0;
  check_mpi(MPI_Get_processor_name(name, &length), "MPI_Get_processor_name");
  host_.assign(name, static_cast<size_t>(length));
}

MpiSession::~MpiSession() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) return;
  const Waiting waiting("the end of MPI");
  if (comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
  if (owns_mpi_) MPI_Finalize();
}

std::vector<std::string> MpiSession::hosts() const {
  std::vector<char> own(MPI_MAX_PROCESSOR_NAME, '\0'), all(own.size() * static_cast<size_t>(ranks_));
  std::copy(host_.begin(), host_.end(), own.begin());
  const int width = static_cast<int>(own.size());
  const Waiting waiting("the names of hosts");
  check_mpi(MPI_Allgather(own.data(), width, MPI_CHAR, all.data(), width, MPI_CHAR, comm_), "MPI_Allgather");
  std::vector<std::string> names;
  for (int r = 0; r < ranks_; ++r)
    names.emplace_back(all.data() + static_cast<size_t>(r) * own.size());
  return names;
}

void MpiSession::together(const std::function<void()>& work) const {
  std::string message;
  auto code = ExitCode::kDone;
  try {
    work();
  } catch (const std::exception& error) {
    const Ending ending = ending_of(error);
    message = ending.message;
    code = ending.exit_code;
  }
  expect_same("an agreement that all went well");
  const int none = std::numeric_limits<int>::max();
  int failed = code == ExitCode::kDone ? none : rank_;
  int first = none;
  const Waiting waiting("an agreement that all went well");
  check_mpi(MPI_Allreduce(&failed, &first, 1, MPI_INT, MPI_MIN, comm_), "MPI_Allreduce");
  if (first == none) return;
  message = broadcast_text(*this, message, first);
  code = static_cast<ExitCode>(broadcast_count(*this, static_cast<int64_t>(code), first));
  throw JointError(
      ranks_ > 1 ? text(message, "\n  rank:   ", first, " on host ", hosts()[static_cast<size_t>(first)])
                 : message,
      code, first);
}

ExitCode MpiSession::or_end_all(const std::function<ExitCode()>& work) const {
  try {
    return work();
  } catch (const JointError&) {
    throw;
  } catch (const std::exception& error) {
    const Ending ending = ending_of(error);
    log_error(ending.message);
    abort(ending.exit_code);
  }
}

void MpiSession::expect_same(const char* operation, int64_t bytes) const {
  if (!checks_operations_ || ranks_ == 1) return;
  struct Told {
    char operation[72] = {};
    int64_t bytes = 0, number = 0;
    bool operator==(const Told&) const = default;
    std::string describe() const { return text("#", number, ", ", operation, ", ", bytes, " bytes"); }
  };
  Told own;
  std::string_view(operation).copy(own.operation, sizeof own.operation - 1);
  own.bytes = bytes, own.number = ++operations_;
  std::vector<Told> all(static_cast<size_t>(ranks_));
  {
    const Waiting waiting("a comparison of operations");
    check_mpi(MPI_Allgather(&own, sizeof own, MPI_BYTE, all.data(), sizeof own, MPI_BYTE, comm_),
              "MPI_Allgather");
  }
  for (size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      throw JointError(
          text("the ranks do not do the same: rank 0 is at operation ", all[0].describe(), "; rank ", rank,
               " at ", all[rank].describe(),
               "\n  remedy: this is a fault of LongHalo, or the ranks run different builds of it"),
          ExitCode::kInternalError, 0);
}

void MpiSession::abort(ExitCode exit_code) const {
  const Waiting waiting("the end of all ranks");
  MPI_Abort(comm_, static_cast<int>(exit_code));
  std::_Exit(static_cast<int>(exit_code));  // MPI_Abort does not return; this keeps the promise if it did
}

void wait_for_all(const MpiSession& session) {
  session.expect_same("a wait for all");
  const Waiting waiting("a wait for all");
  check_mpi(MPI_Barrier(session.comm()), "MPI_Barrier");
}

void broadcast_bytes(const MpiSession& session, void* data, int64_t bytes, int root) {
  session.expect_same("a broadcast", bytes);
  for_each_message(static_cast<char*>(data), bytes, [&](char* at, int count) {
    const Waiting waiting("a broadcast");
    check_mpi(MPI_Bcast(at, count, MPI_BYTE, root, session.comm()), "MPI_Bcast");
  });
}

int64_t broadcast_count(const MpiSession& session, int64_t value, int root) {
  session.expect_same("a broadcast of a count");
  const Waiting waiting("a broadcast");
  check_mpi(MPI_Bcast(&value, 1, MPI_INT64_T, root, session.comm()), "MPI_Bcast");
  return value;
}

std::string broadcast_text(const MpiSession& session, std::string value, int root) {
  const int64_t size = broadcast_count(session, static_cast<int64_t>(value.size()), root);
  value.resize(static_cast<size_t>(size));
  broadcast_bytes(session, value.data(), size, root);
  return value;
}

std::vector<std::string> gather_text(const MpiSession& session, const std::string& value) {
  constexpr int kTag = 71, kRoot = 0;
  session.expect_same("a text of each rank");
  std::vector<std::string> all;
  if (!session.is_root()) {
    const Waiting waiting("a text of each rank", {&kRoot, 1});
    check(static_cast<int64_t>(value.size()) <= kLargestMessageBytes, "a gathered text is at most 1 GiB");
    check_mpi(MPI_Send(value.data(), static_cast<int>(value.size()), MPI_CHAR, kRoot, kTag, session.comm()),
              "MPI_Send");
    return all;
  }
  all.push_back(value);
  for (int peer = 1; peer < session.ranks(); ++peer) {
    const Waiting waiting("a text of each rank", {&peer, 1});
    MPI_Status status;
    check_mpi(MPI_Probe(peer, kTag, session.comm(), &status), "MPI_Probe");
    int size = 0;
    check_mpi(MPI_Get_count(&status, MPI_CHAR, &size), "MPI_Get_count");
    std::string received(static_cast<size_t>(size), '\0');
    check_mpi(MPI_Recv(received.data(), size, MPI_CHAR, peer, kTag, session.comm(), MPI_STATUS_IGNORE),
              "MPI_Recv");
    all.push_back(std::move(received));
  }
  return all;
}

RankSpread spread_over_ranks(const MpiSession& session, double value) {
  session.expect_same("a spread over ranks");
  double extremes[2] = {-value, value}, sum = 0;
  const Waiting waiting("a spread over ranks");
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, extremes, 2, MPI_DOUBLE, MPI_MAX, session.comm()), "MPI_Allreduce");
  check_mpi(MPI_Allreduce(&value, &sum, 1, MPI_DOUBLE, MPI_SUM, session.comm()), "MPI_Allreduce");
  return {-extremes[0], sum / session.ranks(), extremes[1]};
}

int64_t sum_over_ranks(const MpiSession& session, int64_t value) {
  session.expect_same("a sum over ranks");
  int64_t sum = 0;
  const Waiting waiting("a sum over ranks");
  check_mpi(MPI_Allreduce(&value, &sum, 1, MPI_INT64_T, MPI_SUM, session.comm()), "MPI_Allreduce");
  return sum;
}

uint64_t bits_of_ranks(const MpiSession& session, uint64_t bits) {
  session.expect_same("an agreement between ranks");
  uint64_t all = 0;
  const Waiting waiting("an agreement between ranks");
  check_mpi(MPI_Allreduce(&bits, &all, 1, MPI_UINT64_T, MPI_BOR, session.comm()), "MPI_Allreduce");
  return all;
}

}  // namespace longhalo

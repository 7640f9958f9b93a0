#include "comm/halo_exchange.hpp"

#include "comm/message_parts.hpp"
#include "comm/wait_all.hpp"
#include "core/error.hpp"

namespace longhalo {
namespace {

constexpr int kTag = 11;

}  // namespace

HaloExchange::HaloExchange(const MpiSession& session, HaloPlan plan, int64_t row_elements)
    : session_(session), plan_(std::move(plan)), row_elements_(row_elements) {
  check(row_elements >= 1, "a row has at least one element");
}

HaloExchange::~HaloExchange() {
  // Only an exception leaves requests open here; the job is then aborted as a whole, so they are dropped, not
  // awaited.
  for (MPI_Request& request : requests_)
    if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
}

void HaloExchange::start(const KvRows& rows) {
  session_.expect_same("a halo of keys and values", row_elements_);
  check(requests_.empty(), "an exchange is waited for before it starts again");
  // Receives first, so that a message finds its place when it arrives.
  for (const RowTransfer& transfer : plan_.receives)
    post(Direction::kReceive, transfer, rows);
  for (const RowTransfer& transfer : plan_.sends)
    post(Direction::kSend, transfer, rows);
}

// K, then V, each in ascending parts: both sides post in this order, and MPI keeps the order of one pair and
// tag.
void HaloExchange::post(Direction direction, const RowTransfer& transfer, const KvRows& rows) {
  const int64_t offset = (transfer.range.begin - rows.first) * row_elements_;
  const int64_t elements = transfer.range.size() * row_elements_;
  for (float* data : {rows.k, rows.v}) {
    for_each_message(data + offset, elements, [&](float* at, int count) {
      MPI_Request request = MPI_REQUEST_NULL;
      if (direction == Direction::kSend)
        check_mpi(MPI_Isend(at, count, MPI_FLOAT, transfer.peer, kTag, session_.comm(), &request),
                  "MPI_Isend");
      else
        check_mpi(MPI_Irecv(at, count, MPI_FLOAT, transfer.peer, kTag, session_.comm(), &request),
                  "MPI_Irecv");
      requests_.push_back(request);
    });
  }
  const int64_t bytes = 2 * elements * static_cast<int64_t>(sizeof(float));
  (direction == Direction::kSend ? cost_.sent_bytes : cost_.received_bytes) += bytes;
}

void HaloExchange::poll() {
  if (requests_.empty()) return;
  int all_done = 0;
  check_mpi(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &all_done, MPI_STATUSES_IGNORE),
            "MPI_Testall");
}

void HaloExchange::wait() {
  wait_all(requests_, cost_, "a halo of keys and values", peers_of(plan_.sends, peers_of(plan_.receives)));
  requests_.clear();
}

}  // namespace longhalo

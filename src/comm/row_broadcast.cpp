#include "comm/row_broadcast.hpp"

#include <algorithm>

#include "comm/message_parts.hpp"
#include "comm/wait_all.hpp"

namespace longhalo {

RowBroadcast::RowBroadcast(const MpiSession& session, const ShardPlan& shards, TokenRange range,
                           int64_t row_elements)
    : session_(session), parts_(rows_by_owner(shards, range)), row_elements_(row_elements) {}

void RowBroadcast::start(const KvRows& own, const KvRows& all) {
  session_.expect_same("the context's keys and values", row_elements_);
  check(requests_.empty(), "a broadcast is waited for before it starts again");
  for (const RowTransfer& part : parts_) {
    const int64_t elements = part.range.size() * row_elements_;
    const int64_t target = (part.range.begin - all.first) * row_elements_;
    const bool owner = part.peer == session_.rank();
    if (owner) {
      const int64_t source = (part.range.begin - own.first) * row_elements_;
      std::copy_n(own.k + source, elements, all.k + target);
      std::copy_n(own.v + source, elements, all.v + target);
    }
    if (session_.ranks() == 1) continue;
    for (float* data : {all.k, all.v}) {
      for_each_message(data + target, elements, [&](float* at, int count) {
        MPI_Request request = MPI_REQUEST_NULL;
        check_mpi(MPI_Ibcast(at, count, MPI_FLOAT, part.peer, session_.comm(), &request), "MPI_Ibcast");
        requests_.push_back(request);
      });
    }
    const int64_t bytes = 2 * elements * static_cast<int64_t>(sizeof(float));
    (owner ? cost_.sent_bytes : cost_.received_bytes) += bytes;
  }
}

void RowBroadcast::wait() {
  wait_all(requests_, cost_, "the context's keys and values from their owners", peers_of(parts_));
  requests_.clear();
}

}  // namespace longhalo

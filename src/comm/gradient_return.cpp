#include "comm/gradient_return.hpp"

#include "comm/message_parts.hpp"
#include "comm/wait_all.hpp"
#include "core/error.hpp"

namespace longhalo {
namespace {

constexpr int kTag = 13;

}  // namespace

ReturnPlan halo_return(const HaloPlan& plan) {
  return {plan.receives, plan.sends};
}

ReturnPlan landmark_return(const ShardPlan& shards, int rank, int64_t stride) {
  ReturnPlan plan;
  if (shards.shard(rank).empty()) return plan;
  for (int owner = 0; owner < rank; ++owner) {
    const TokenRange segments = shards.segments(owner, stride);
    if (!segments.empty()) plan.sends.push_back({owner, segments});
  }
  const TokenRange own = shards.segments(rank, stride);
  if (own.empty()) return plan;
  for (int peer = rank + 1; peer < shards.ranks(); ++peer)
    if (!shards.shard(peer).empty()) plan.receives.push_back({peer, own});
  return plan;
}

GradientReturn::GradientReturn(const MpiSession& session, ReturnPlan plan, int64_t row_elements)
    : session_(session), plan_(std::move(plan)), row_elements_(row_elements) {
  int64_t rows = 0;
  for (const RowTransfer& receive : plan_.receives)
    rows += receive.range.size();
  arrived_ = HostBuffer<float>(2 * rows * row_elements, "gradients of keys from other ranks");
}

GradientReturn::~GradientReturn() {
  // Only an exception leaves requests open here; the job is then aborted as a whole.
  for (MPI_Request& request : requests_)
    if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
}

void GradientReturn::start(const KvRows& rows) {
  session_.expect_same("gradients of keys and values on their way to their owners", row_elements_);
  check(requests_.empty(), "gradients are added before the next ones are sent");
  float* at = arrived_.data();
  for (const RowTransfer& receive : plan_.receives) {
    const int64_t elements = 2 * receive.range.size() * row_elements_;
    // Keys, then values: each of the sender's two arrays comes in parts of its own.
    for (int array = 0; array < 2; ++array, at += elements / 2) {
      for_each_message(at, elements / 2, [&](float* part, int count) {
        check_mpi(MPI_Irecv(part, count, MPI_FLOAT, receive.peer, kTag, session_.comm(),
                            &requests_.emplace_back(MPI_REQUEST_NULL)),
                  "MPI_Irecv");
      });
    }
    cost_.received_bytes += elements * static_cast<int64_t>(sizeof(float));
  }
  for (const RowTransfer& send : plan_.sends) {
    const int64_t offset = (send.range.begin - rows.first) * row_elements_;
    const int64_t elements = send.range.size() * row_elements_;
    for (float* data : {rows.k, rows.v}) {
      for_each_message(data + offset, elements, [&](float* part, int count) {
        check_mpi(MPI_Isend(part, count, MPI_FLOAT, send.peer, kTag, session_.comm(),
                            &requests_.emplace_back(MPI_REQUEST_NULL)),
                  "MPI_Isend");
      });
    }
    cost_.sent_bytes += 2 * elements * static_cast<int64_t>(sizeof(float));
  }
}

void GradientReturn::poll() {
  if (requests_.empty()) return;
  int all_done = 0;
  check_mpi(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &all_done, MPI_STATUSES_IGNORE),
            "MPI_Testall");
}

void GradientReturn::add(const KvRows& rows) {
  wait_all(requests_, cost_, "gradients of keys and values on their way to their owners",
           peers_of(plan_.sends, peers_of(plan_.receives)));
  requests_.clear();
  const float* at = arrived_.data();
  for (const RowTransfer& receive : plan_.receives) {
    const int64_t offset = (receive.range.begin - rows.first) * row_elements_;
    const int64_t elements = receive.range.size() * row_elements_;
    for (float* data : {rows.k, rows.v}) {
      for (int64_t i = 0; i < elements; ++i)
        data[offset + i] += at[i];
      at += elements;
    }
  }
}

}  // namespace longhalo

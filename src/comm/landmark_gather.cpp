#include "comm/landmark_gather.hpp"

#include <limits>

#include "comm/wait_all.hpp"
#include "core/error.hpp"

namespace longhalo {

LandmarkGather::LandmarkGather(const MpiSession& session, const ShardPlan& shards, int64_t stride,
                               int64_t row_elements)
    : session_(session),
      own_(shards.segments(session.rank(), stride)),
      segments_(shards.tokens() / stride),
      row_elements_(row_elements) {
  check(segments_ <= std::numeric_limits<int>::max(), "the number of landmarks fits an MPI count");
  int64_t next = 0;
  for (int rank = 0; rank < shards.ranks(); ++rank) {
    const TokenRange range = shards.segments(rank, stride);
    const int64_t count = range.empty() ? 0 : range.size();
    check(count == 0 || range.begin == next, "the segments of all ranks follow each other without gaps");
    counts_.push_back(static_cast<int>(count));
    displacements_.push_back(static_cast<int>(next));
    next += count;
  }
  check(next == segments_, "every complete segment has an owner");
  check_mpi(MPI_Type_contiguous(static_cast<int>(row_elements), MPI_FLOAT, &row_), "MPI_Type_contiguous");
  check_mpi(MPI_Type_commit(&row_), "MPI_Type_commit");
}

LandmarkGather::~LandmarkGather() {
  if (row_ != MPI_DATATYPE_NULL) MPI_Type_free(&row_);
}

void LandmarkGather::start(float* k, float* v) {
  session_.expect_same("the landmarks of all ranks", segments_ * row_elements_);
  if (segments_ == 0 || session_.ranks() == 1) return;
  float* buffers[2] = {k, v};
  for (int i = 0; i < 2; ++i)
    check_mpi(MPI_Iallgatherv(MPI_IN_PLACE, 0, row_, buffers[i], counts_.data(), displacements_.data(), row_,
                              session_.comm(), &requests_[i]),
              "MPI_Iallgatherv");
  const auto row_bytes = row_elements_ * static_cast<int64_t>(sizeof(float));
  const int64_t own = own_.empty() ? 0 : own_.size();
  cost_.sent_bytes += 2 * own * row_bytes * (session_.ranks() - 1);
  cost_.received_bytes += 2 * (segments_ - own) * row_bytes;
}

void LandmarkGather::poll() {
  int all_done = 0;
  check_mpi(MPI_Testall(2, requests_, &all_done, MPI_STATUSES_IGNORE), "MPI_Testall");
}

void LandmarkGather::wait() {
  wait_all(requests_, cost_, "the landmarks of all ranks");
}

}  // namespace longhalo

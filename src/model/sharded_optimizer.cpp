#include "model/sharded_optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "comm/wait_all.hpp"
#include "core/waiting.hpp"

namespace longhalo {
namespace {

constexpr int kTag = 31;
constexpr size_t kMostFlights = 4;  // buckets on their way at once; bounds their memory

std::span<float> part_of(HostBuffer<float>& values, int64_t first, int64_t count) {
  return values.span().subspan(static_cast<size_t>(first), static_cast<size_t>(count));
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(const MpiSession& session, Weights& weights, Weights& gradients,
                                   const AdamWOptions& options, int64_t bucket_elements)
    : session_(session),
      comm_(session.comm()),
      weights_(parameters_of(weights)),
      gradients_(parameters_of(gradients)),
      options_(options),
      elements_(elements_of(weights_)),
      plan_(elements_, session.ranks(), bucket_elements) {
  check(elements_of(gradients_) == elements_ && bucket_elements <= std::numeric_limits<int>::max(),
        "gradients are shaped like weights, and a bucket fits an MPI count");
  const int64_t owned = plan_.owned(session.rank());
  master_ = HostBuffer<float>(owned, "master weights");
  m_ = HostBuffer<float>(owned, "first moments");
  v_ = HostBuffer<float>(owned, "second moments");
  sums_ = HostBuffer<float>(owned, "summed gradients");
  std::fill(m_.data(), m_.data() + owned, 0.0F);
  std::fill(v_.data(), v_.data() + owned, 0.0F);
  for (int64_t bucket = 0; bucket < plan_.buckets(); ++bucket) {
    const ElementRange part = plan_.part(bucket, session.rank());
    copy_from_parameters(weights_, part.begin,
                         part_of(master_, plan_.owned_before(bucket, session.rank()), part.size()));
  }
}

ShardedOptimizer::~ShardedOptimizer() {
  // Only an exception leaves requests open here; the job is then aborted as a whole, so they are dropped, not
  // awaited.
  for (Flight& flight : flights_)
    for (MPI_Request& request : flight.requests)
      if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
}

OptimizerLayout ShardedOptimizer::layout() const {
  OptimizerLayout layout;
  for (int64_t bucket = 0; bucket < plan_.buckets(); ++bucket) {
    layout.groups.push_back(plan_.bucket(bucket));
    layout.owned.push_back(
        {plan_.part(bucket, session_.rank()), plan_.owned_before(bucket, session_.rank())});
  }
  return layout;
}

void ShardedOptimizer::gradients_ready(int64_t elements) {
  const int64_t complete = plan_.complete_buckets(elements);
  while (started_ < complete) {
    if (flights_.size() == kMostFlights) land_oldest();
    start_bucket(started_++);
  }
}

void ShardedOptimizer::poll() {
  for (Flight& flight : flights_) {
    int all_done = 0;
    check_mpi(MPI_Testall(static_cast<int>(flight.requests.size()), flight.requests.data(), &all_done,
                          MPI_STATUSES_IGNORE),
              "MPI_Testall");
  }
}

// Every rank sends each other rank the part that it owns. All ranks post buckets in the same order, and MPI
// keeps the order of one pair and tag.
void ShardedOptimizer::start_bucket(int64_t bucket) {
  const int self = session_.rank(), ranks = session_.ranks();
  const ElementRange whole = plan_.bucket(bucket), own = plan_.part(bucket, self);
  Flight& flight = flights_.emplace_back();
  flight.bucket = bucket;
  flight.sent = HostBuffer<float>(whole.size(), "a bucket of gradients");
  flight.received = HostBuffer<float>(own.size() * ranks, "parts of a bucket of gradients");
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == self || own.size() == 0) continue;
    check_mpi(MPI_Irecv(flight.received.data() + peer * own.size(), static_cast<int>(own.size()), MPI_FLOAT,
                        peer, kTag, comm_.get(), &flight.requests.emplace_back(MPI_REQUEST_NULL)),
              "MPI_Irecv");
    cost_.received_bytes += own.size() * static_cast<int64_t>(sizeof(float));
  }
  copy_from_parameters(gradients_, whole.begin, flight.sent.span());
  for (int peer = 0; peer < ranks; ++peer) {
    const ElementRange part = plan_.part(bucket, peer);
    const float* from = flight.sent.data() + (part.begin - whole.begin);
    if (peer == self) {
      std::copy_n(from, part.size(), flight.received.data() + self * part.size());
    } else if (part.size() > 0) {
      check_mpi(MPI_Isend(from, static_cast<int>(part.size()), MPI_FLOAT, peer, kTag, comm_.get(),
                          &flight.requests.emplace_back(MPI_REQUEST_NULL)),
                "MPI_Isend");
      cost_.sent_bytes += part.size() * static_cast<int64_t>(sizeof(float));
    }
  }
}

void ShardedOptimizer::land_oldest() {
  Flight& flight = flights_.front();
  wait_all(flight.requests, cost_, "a bucket of gradients from all ranks");
  const int64_t count = plan_.part(flight.bucket, session_.rank()).size();
  float* sums = sums_.data() + plan_.owned_before(flight.bucket, session_.rank());
  double squares = 0;
  for (int64_t i = 0; i < count; ++i) {
    double sum = 0;  // NOTE: in rank order, whatever the order of arrival
    for (int rank = 0; rank < session_.ranks(); ++rank)
      sum += static_cast<double>(flight.received[rank * count + i]);
    sums[i] = static_cast<float>(sum);
    squares += sum * sum;
  }
  squares_ += squares;
  flights_.pop_front();
}

double ShardedOptimizer::finish_gradients() {
  gradients_ready(elements_);
  while (!flights_.empty())
    land_oldest();
  std::vector<double> squares(static_cast<size_t>(session_.ranks()));
  const Waiting waiting("the norm of the gradient");
  check_mpi(MPI_Allgather(&squares_, 1, MPI_DOUBLE, squares.data(), 1, MPI_DOUBLE, comm_.get()),
            "MPI_Allgather");
  started_ = 0;
  squares_ = 0;
  double sum = 0;
  for (const double one : squares)
    sum += one;
  return std::sqrt(sum);
}

void ShardedOptimizer::update(double learning_rate, double gradient_scale) {
  ++steps_;
  for (int64_t bucket = 0; bucket < plan_.buckets(); ++bucket) {
    const ElementRange part = plan_.part(bucket, session_.rank());
    const int64_t own = plan_.owned_before(bucket, session_.rank());
    for_each_parameter(weights_, part.begin, part.end,
                       [&](const Parameter& parameter, int64_t at, int64_t, int64_t count) {
                         const double decay = parameter.decay == Decay::kYes ? options_.weight_decay : 0;
                         adamw_update(options_, learning_rate, decay, steps_, gradient_scale,
                                      part_of(sums_, own + at, count),
                                      {part_of(master_, own + at, count), part_of(m_, own + at, count),
                                       part_of(v_, own + at, count)});
                       });
  }
  share_weights();
}

void ShardedOptimizer::restore(int64_t steps) {
  steps_ = steps;
  share_weights();
}

void ShardedOptimizer::share_weights() {
  struct Gathered {
    HostBuffer<float> flat;
    std::vector<int> counts, places;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  std::deque<std::pair<int64_t, Gathered>> flights;
  const auto land = [&] {
    auto& [bucket, gathered] = flights.front();
    wait_all({&gathered.request, 1}, cost_, "new weights from all ranks");
    copy_to_parameters(weights_, plan_.bucket(bucket).begin, gathered.flat.span());
    flights.pop_front();
  };
  for (int64_t bucket = 0; bucket < plan_.buckets(); ++bucket) {
    if (flights.size() == kMostFlights) land();
    const ElementRange whole = plan_.bucket(bucket), own = plan_.part(bucket, session_.rank());
    Gathered& gathered = flights.emplace_back(bucket, Gathered{}).second;
    gathered.flat = HostBuffer<float>(whole.size(), "a bucket of weights");
    for (int rank = 0; rank < session_.ranks(); ++rank) {
      const ElementRange part = plan_.part(bucket, rank);
      gathered.counts.push_back(static_cast<int>(part.size()));
      gathered.places.push_back(static_cast<int>(part.begin - whole.begin));
    }
    check_mpi(
        MPI_Iallgatherv(master_.data() + plan_.owned_before(bucket, session_.rank()),
                        static_cast<int>(own.size()), MPI_FLOAT, gathered.flat.data(), gathered.counts.data(),
                        gathered.places.data(), MPI_FLOAT, comm_.get(), &gathered.request),
        "MPI_Iallgatherv");
    cost_.sent_bytes += own.size() * (session_.ranks() - 1) * static_cast<int64_t>(sizeof(float));
    cost_.received_bytes += (whole.size() - own.size()) * static_cast<int64_t>(sizeof(float));
  }
  while (!flights.empty())
    land();
}

}  // namespace longhalo
